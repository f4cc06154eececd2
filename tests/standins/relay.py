"""A port of this machine's loopback, at an address of another network namespace: `python -m tests.standins.relay PID ADDRESS PORT`.

Why here: the tests' Docker daemon lives in a namespace of its own, and the adapter listens outside it.
Called by: tests/e2e/sandboxes. Prints `ready` when it listens; ends with SIGTERM.
"""

import asyncio
import contextlib
import os
import socket
import sys

from ratchet.local.sandbox_gateway.boxd import kernel


def _listen_inside(pid: int, address: str, port: int) -> socket.socket:
    ours = os.open("/proc/self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    kernel.setns(theirs, kernel.CLONE_NEWNET)
    listener = socket.create_server((address, port))
    kernel.setns(ours, kernel.CLONE_NEWNET)
    return listener


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
        target.write_eof()


async def _serve(pid: int, address: str, port: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(back):
                await asyncio.gather(_copy(reader, back), _copy(there, writer))

    async with await asyncio.start_server(connected, sock=_listen_inside(pid, address, port)) as server:
        print("ready", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
