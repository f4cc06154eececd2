"""Export this process's spans by OTLP over HTTP, if the environment names a collector.

Read are OpenTelemetry's own variables, such as OTEL_EXPORTER_OTLP_ENDPOINT. A thread exports batches from a queue of
bounded length, so ending a span never waits. A span is lost if the queue is full or the collector does not take it
within OTEL_EXPORTER_OTLP_TIMEOUT; lost spans are counted and logged, at most once a minute.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Sequence

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision

from ratchet import tracing
from ratchet.tracing import FIXED_IDS, HTTP_PROTOCOL, Exporting, collector_protocol, collector_url

_LOG = structlog.get_logger("ratchet.tracing")
_SHUTDOWN_SECONDS = 2.0
_REPORT_SECONDS = 60.0
_QUEUE_SPANS = 2048


def start_exporting(part: str) -> None:
    """Export this process's spans until it ends, if a collector is named. A setting that cannot be used is logged.

    `part`: for the service's name, `ratchet-PART`, unless OTEL_SERVICE_NAME gives another.
    """
    url = collector_url()
    if url is None:
        return
    protocol = collector_protocol()
    if protocol != HTTP_PROTOCOL:
        _LOG.warning("no traces: only http/protobuf is supported, usually at port 4318", protocol=protocol)
        return
    try:
        exporter = CountedExporter(OTLPSpanExporter(endpoint=url))
        names = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or f"ratchet-{part}", "ratchet.part": part}
        provider = TracerProvider(
            resource=Resource.create(names), id_generator=RolloutIdGenerator(), shutdown_on_exit=False
        )
        provider.add_span_processor(CountedProcessor(exporter))
    except Exception as error:  # a mistake in the settings must not stop what is traced
        _LOG.warning("no traces", reason=str(error))
        return
    sampler = provider.sampler

    def is_sampled(trace_id: int) -> bool:
        return sampler.should_sample(None, trace_id, "rollout").decision is not Decision.DROP

    tracing.export_by(Exporting(provider.get_tracer("ratchet"), is_sampled))
    # Its messages repeat for every batch; `CountedExporter` says the same once a minute.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    atexit.register(_stop, provider, exporter)
    _LOG.info("traces are exported", collector=url)


def _stop(provider: TracerProvider, exporter: "CountedExporter") -> None:
    """Export what is queued, for two seconds at most."""
    closing = threading.Thread(target=provider.shutdown, daemon=True)
    closing.start()
    closing.join(_SHUTDOWN_SECONDS)
    exporter.report_at_end()


class RolloutIdGenerator(RandomIdGenerator):
    """Draws ids, except for the spans of a rollout and its attempts (`tracing.record_span`)."""

    def generate_span_id(self) -> int:
        fixed = FIXED_IDS.get()
        return super().generate_span_id() if fixed is None else fixed.span_id

    def generate_trace_id(self) -> int:
        fixed = FIXED_IDS.get()
        return super().generate_trace_id() if fixed is None else fixed.trace_id


class CountedExporter(SpanExporter):
    """Passes spans to another exporter and counts them.

    `num_ended`: sampled spans that have ended. `num_taken`: those that the exporting thread has taken from the queue.
    `num_exported`: those that the collector has. `num_lost`: those that it will never have.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._counting = threading.Lock()
        self._reported_at = float("-inf")
        self.num_ended = 0
        self.num_taken = 0
        self.num_exported = 0
        self.num_lost = 0

    def note_end(self, queue_spans: int) -> None:
        """Count a span that has ended; if the queue is full, the processor drops the oldest one."""
        with self._counting:
            self.num_ended += 1
            num_dropped = self.num_ended - self.num_taken - queue_spans
            is_dropped = num_dropped > 0
            if is_dropped:
                self.num_taken += 1
                self.num_lost += 1
        if is_dropped:
            self._report("the queue is full")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._counting:
            self.num_taken += len(spans)
        result = self._exporter.export(spans)
        with self._counting:
            if result is SpanExportResult.SUCCESS:
                self.num_exported += len(spans)
            else:
                self.num_lost += len(spans)
        if result is not SpanExportResult.SUCCESS:
            self._report("the collector does not take them")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def report_at_end(self) -> None:
        """Log how many spans the collector has not got, those in the queue included."""
        if self.num_ended > self.num_exported:
            _LOG.warning("spans lost", number=self.num_ended - self.num_exported, of=self.num_ended)

    def _report(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._reported_at > _REPORT_SECONDS:
            self._reported_at = now
            _LOG.warning("spans lost", number=self.num_lost, of=self.num_ended, reason=reason)


class CountedProcessor(BatchSpanProcessor):
    """The SDK's bounded queue and thread, whose dropped spans are counted."""

    def __init__(self, exporter: CountedExporter) -> None:
        size = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
        self._queue_spans = int(size) if size.isdigit() and int(size) else _QUEUE_SPANS
        super().__init__(exporter, max_queue_size=self._queue_spans)
        self._counted = exporter

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._counted.note_end(self._queue_spans)
        super().on_end(span)
