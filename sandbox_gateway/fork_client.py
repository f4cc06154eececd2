"""The gateway's end of the fork server, which only boots boxd processes; all other calls go directly to boxd."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from sandbox_gateway.boxd.id_modes import id_mode
from sandbox_gateway.wire_errors import HTTP_STATUS_OF_CODE, RETRY_AFTER, RefusalError

BOOT_SECONDS, COPY_SECONDS = 30.0, 3600.0
_ENVIRONMENT = {"LANG": "C.UTF-8"}
"""The whole environment of boxd and of all that it starts: the gateway's contains credentials of the host."""
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from sandbox_gateway.boxd import fork_server; fork_server."
_SERVE = "run_fork_server(int(sys.argv[3]), sys.argv[4], sys.argv[2])"
_REMOVE = "remove_tree(sys.argv[3], sys.argv[2])"


def _command(call: str, *arguments: str) -> list[str]:
    """Return the command of a process that may become root of the gateway's own namespaces. -I -S: nothing of the
    user's environment and no site-packages in a process with such rights."""
    checkout, ids = str(Path(__file__).resolve().parents[1]), json.dumps(asdict(id_mode()))
    return [sys.executable, "-I", "-S", "-c", _PROGRAM + call, checkout, ids, *arguments]


def remove_tree(path: Path) -> None:
    """Remove a tree whose files may have any id of a box; what cannot be removed stays."""
    if id_mode().first_id is None:
        shutil.rmtree(path, ignore_errors=True)
    else:
        subprocess.run(_command(_REMOVE, str(path)), env=_ENVIRONMENT, stdin=subprocess.DEVNULL, check=False)


class ForkServer:
    def __init__(self, bubblewrap: str) -> None:
        self._bubblewrap = bubblewrap
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = _command(_SERVE, str(theirs.fileno()), self._bubblewrap)
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

    async def boot(self, directory: Path, seconds: float) -> int:
        """Boot the box described by `directory`/box.json in at most so many seconds; return the pid of its boxd.

        Raises RefusalError with the reason if the box cannot start: 503 if the disk is full, else 500. A fork server
        that was killed is restarted.
        """
        if self._process.poll() is not None:
            self._socket.close()
            self._start()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            socket.send_fds(self._socket, [str(directory).encode()], [theirs.fileno()])
            theirs.close()
            async with asyncio.timeout(seconds):
                answer = await asyncio.get_running_loop().sock_recv(ours, 65_536)
        except (OSError, TimeoutError) as error:
            raise RefusalError(500, f"the box could not be started: {error or 'boxd does not answer'}") from error
        finally:
            ours.close()
            theirs.close()
        reply = json.loads(answer or b'{"error": "boxd ended before it was ready"}')
        if "error" in reply:
            status = HTTP_STATUS_OF_CODE[reply.get("code", "internal")]
            raise RefusalError(status, f"the box could not be started: {reply['error']}", RETRY_AFTER)
        return int(reply["pid"])

    def close(self) -> None:
        """End the fork server; boxes that it started live on."""
        self._socket.close()
        self._process.wait(timeout=5)
