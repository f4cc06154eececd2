"""The viewer's settings, as its command fills them in."""

from dataclasses import dataclass
from pathlib import Path

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True, frozen=True)
class ViewerSettings:
    """`token`: what a reader must present, None if the viewer listens on loopback only. `temporal_ui`: address of the
    Temporal UI for links, empty without one. `trace_url`: address of a trace in the tool that shows
    traces, with `{trace_id}`, empty without one. `is_export`: pages are written to files, so they must work without a
    server. `home`: the state directory, whose disk and parts `/metrics` shows."""

    database_url: str
    host: str = "127.0.0.1"
    port: int = 8420
    token: str | None = None
    temporal_ui: str = ""
    temporal_namespace: str = "default"
    trace_url: str = ""
    is_export: bool = False
    home: Path | None = None

    @property
    def address(self) -> str:
        """The URL under which this machine reaches the viewer."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
