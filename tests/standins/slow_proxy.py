"""A TCP proxy that passes everything on, each chunk of a client after `delay_seconds`, as a slow server would."""

import asyncio
import contextlib
from typing import Self


class SlowProxy:
    """Listens on loopback within the context. `delay_seconds` may change at any time."""

    def __init__(self, host: str, port: int, delay_seconds: float = 0.0) -> None:
        self.target = (host, port)
        self.delay_seconds = delay_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.close()
            return
        for source, sink, is_client in ((reader, far_writer, True), (far_reader, writer, False)):
            task = asyncio.create_task(self._copy(source, sink, is_client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_client: bool) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    if is_client and self.delay_seconds:
                        await asyncio.sleep(self.delay_seconds)
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.close()
