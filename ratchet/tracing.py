"""OpenTelemetry spans of rollouts: one trace per rollout, in all processes that work on it.

Trace ids, and the span ids of a rollout and of its attempts, are hashes of the installation's id and the rollout's. So
every process knows them without being told, in every retry, and the viewer can link to the trace. Context that is
passed along, as Temporal's own interceptor does in headers of workflows, would end at the agent's program, which passes
nothing on.

Without an exporter (`ratchet.trace_export`) every function here does nothing.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from uuid import UUID

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ratchet.secrets import without_secrets

Fact = str | int | float | bool | None
Facts = Mapping[str, Fact]
"""Attributes by name: with a dot that of a convention, such as `gen_ai.…`; else below `ratchet.`. None is left out."""

HTTP_PROTOCOL = "http/protobuf"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_MAX_REASON_CHARS = 300
_PROPAGATOR = TraceContextTextMapPropagator()


def collector_url() -> str | None:
    """Return the URL to which spans are sent, None if the environment names no collector."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    own, base = (os.environ.get(name) for name in _ENDPOINTS)
    return own or (f"{base.rstrip('/')}/v1/traces" if base else None)


def collector_protocol() -> str:
    """Return the protocol that the environment names; by default OTLP over HTTP."""
    return next((value for name in _PROTOCOLS if (value := os.environ.get(name))), HTTP_PROTOCOL)


@dataclass(frozen=True, slots=True)
class SpanIds:
    """The ids of a span that is recorded under ids which other processes have derived already."""

    trace_id: int
    span_id: int


FIXED_IDS: ContextVar[SpanIds | None] = ContextVar("FIXED_IDS", default=None)
"""The ids of the span that is started now; None: the exporter's generator draws them."""


@dataclass(frozen=True, slots=True)
class RolloutTrace:
    """The trace of one rollout. `trace_id`: 128 bits."""

    trace_id: int

    @classmethod
    def of(cls, installation: UUID, rollout_id: int) -> "RolloutTrace":
        """Return the rollout's trace. Rollouts are numbered per installation, and a collector may serve several."""
        return cls(_hashed(f"{installation}/{rollout_id}", 16))

    @property
    def hex(self) -> str:
        """The trace id as collectors show it: 32 hexadecimal digits."""
        return trace.format_trace_id(self.trace_id)

    def span_id(self, attempt: int | None = None) -> int:
        """Return the span id of an attempt, or of the whole rollout."""
        return _hashed(f"{self.hex}/{'rollout' if attempt is None else attempt}", 8)

    def parent(self, attempt: int | None = None) -> Context:
        """Return the context in which spans are children of the attempt, or of the whole rollout."""
        is_sampled = _exporting is not None and _exporting.is_sampled(self.trace_id)
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        context = SpanContext(self.trace_id, self.span_id(attempt), is_remote=True, trace_flags=flags)
        return trace.set_span_in_context(NonRecordingSpan(context), Context())


def _hashed(text: str, num_bytes: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=num_bytes).digest()) or 1  # 0 is no valid id


@dataclass(frozen=True, slots=True)
class Exporting:
    """A tracer that exports its spans. `is_sampled`: whether it exports a trace, by its id alone."""

    tracer: trace.Tracer
    is_sampled: Callable[[int], bool]


_exporting: Exporting | None = None


def export_by(exporting: Exporting | None) -> None:
    """Export this process's spans by a tracer; None: no longer.

    Its provider is not made OpenTelemetry's global one: HTTP clients of our dependencies would use that, too, and name
    signed URLs in spans of their own.
    """
    global _exporting
    _exporting = exporting


def is_on() -> bool:
    """Return whether this process exports spans."""
    return _exporting is not None


@contextlib.contextmanager
def rollout_span(rollout: RolloutTrace, attempt: int | None, name: str, facts: Facts) -> Iterator[Span]:
    """Run the block in a span that is a child of the rollout's attempt, or of the rollout."""
    if not is_on():
        yield trace.INVALID_SPAN
        return
    with _running(_tracer().start_span(name, rollout.parent(attempt), attributes=_attributes(facts))) as span:
        yield span


@contextlib.contextmanager
def span(name: str, facts: Facts, kind: SpanKind = SpanKind.INTERNAL) -> Iterator[Span]:
    """Run the block in a child of the present span; without one there is no span."""
    if not (is_on() and trace.get_current_span().get_span_context().is_valid):
        yield trace.INVALID_SPAN
        return
    with _running(_tracer().start_span(name, kind=kind, attributes=_attributes(facts))) as span:
        yield span


def add_facts(facts: Facts) -> None:
    trace.get_current_span().set_attributes(_attributes(facts))


def present_trace() -> RolloutTrace | None:
    """Return the trace of the present span, None without one."""
    context = trace.get_current_span().get_span_context()
    return RolloutTrace(context.trace_id) if is_on() and context.is_valid else None


def record_span(
    rollout: RolloutTrace, attempt: int | None, name: str, began_at: datetime, ended_at: datetime, facts: Facts
) -> None:
    """Export the span of an attempt, or of the whole rollout, which other spans have named as their parent already.

    Its ids are always the same, so a span that is exported again is the same span.
    """
    if not is_on():
        return
    fixed = FIXED_IDS.set(SpanIds(rollout.trace_id, rollout.span_id(attempt)))
    try:
        parent = Context() if attempt is None else rollout.parent()
        span = _tracer().start_span(name, parent, attributes=_attributes(facts), start_time=_nanoseconds(began_at))
    finally:
        FIXED_IDS.reset(fixed)
    span.end(_nanoseconds(ended_at))


def trace_headers() -> dict[str, str]:
    """Return the HTTP headers by which a server makes its spans children of the present one (W3C `traceparent`)."""
    headers: dict[str, str] = {}
    if is_on():
        _PROPAGATOR.inject(headers)
    return headers


@contextlib.contextmanager
def _running(span: Span) -> Iterator[Span]:
    """Make the span the present one for the block. An error is its status; stack traces may hold secrets."""
    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield span
        except BaseException as error:
            reason = without_secrets(f"{type(error).__name__}: {error}")[:_MAX_REASON_CHARS]
            span.set_status(Status(StatusCode.ERROR, reason))
            raise


def _tracer() -> trace.Tracer:
    assert _exporting is not None, "is_on() was asked before"
    return _exporting.tracer


def _attributes(facts: Facts) -> dict[str, str | int | float | bool]:
    return {name if "." in name else f"ratchet.{name}": value for name, value in facts.items() if value is not None}


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1e6) * 1000
