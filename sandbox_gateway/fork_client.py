"""The gateway's end of the fork server, which starts boxd processes.

Only booting goes through it; all other calls go directly to boxd.
"""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

from sandbox_gateway.wire_errors import RefusalError

_BOOT_SECONDS = 30.0
_ENVIRONMENT = {"LANG": "C.UTF-8"}
"""The whole environment of boxd and of all that it starts: the gateway's contains credentials of the host."""
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    "from sandbox_gateway.boxd.fork_server import run_fork_server; run_fork_server(int(sys.argv[2]), sys.argv[3])"
)


class ForkServer:
    def __init__(self, bubblewrap: str) -> None:
        self._bubblewrap = bubblewrap
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        checkout = Path(__file__).resolve().parents[1]
        # -I -S: nothing of the user's environment and no site-packages in a process that runs as root beside a box.
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(checkout), str(theirs.fileno()), self._bubblewrap]
        self._process = subprocess.Popen(
            command,
            env=_ENVIRONMENT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        theirs.close()
        self._socket = ours

    async def boot(self, directory: Path) -> int:
        """Boot the box described by `directory`/box.json and return the pid of its boxd.

        Raises RefusalError(500) with the reason if the box cannot start. A fork server that was killed is restarted.
        """
        if self._process.poll() is not None:
            self._socket.close()
            self._start()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            socket.send_fds(self._socket, [str(directory).encode()], [theirs.fileno()])
            theirs.close()
            async with asyncio.timeout(_BOOT_SECONDS):
                answer = await asyncio.get_running_loop().sock_recv(ours, 65_536)
        except (OSError, TimeoutError) as error:
            raise RefusalError(500, f"the box could not be started: {error or 'boxd does not answer'}") from error
        finally:
            ours.close()
            theirs.close()
        reply = json.loads(answer or b'{"error": "boxd ended before it was ready"}')
        if "error" in reply:
            raise RefusalError(500, f"the box could not be started: {reply['error']}")
        return int(reply["pid"])

    def close(self) -> None:
        """End the fork server; boxes that it started live on."""
        self._socket.close()
        self._process.wait(timeout=5)
