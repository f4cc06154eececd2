"""A collector of traces: OTLP over HTTP, spans kept in memory. It can also hang or refuse, which no real one does on
demand."""

import gzip
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.standins.http_server import LoopbackServer, QuietHandler


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it arrived. Ids are hexadecimal; `parent` is empty for a root. `error`: None if it has none."""

    trace: str
    id: str
    parent: str
    name: str
    service: str
    attributes: dict[str, Any]
    began: int
    ended: int
    error: str | None


@dataclass
class Collector:
    """Listens on a free port of loopback. `hangs`: takes requests and never answers. `status`: of its answers."""

    hangs: bool = False
    status: int = 200
    spans: list[CollectedSpan] = field(default_factory=list)
    num_requests: int = 0
    released: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        collector = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = self.body()
                collector.num_requests += 1
                if collector.hangs:
                    collector.released.wait()
                    return
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if collector.status == 200:
                    collector.spans += spans_of(ExportTraceServiceRequest.FromString(body))
                self.answer(collector.status)

        self.server = LoopbackServer(Handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.released.set()
        self.server.close()

    @property
    def url(self) -> str:
        return self.server.url

    def named(self, name: str) -> list[CollectedSpan]:
        """Return the spans of this name in the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.began)


def spans_of(request: ExportTraceServiceRequest) -> list[CollectedSpan]:
    found = []
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            found += [
                CollectedSpan(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    str(service),
                    _attributes(span.attributes),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.message if span.status.code == 2 else None,
                )
                for span in scope.spans
            ]
    return found


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
