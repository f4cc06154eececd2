"""The span of a turn, which is a child of its rollout's attempt, and the ids in the log lines of its call.

The agent's program passes no trace context on, so both follow from the session.
"""

import contextlib
from collections.abc import Iterator

import structlog
from opentelemetry.trace import Span, SpanKind

from adapter.conversation import Answer
from adapter.prompt.prompt_builder import PreparedCall
from ratchet import tracing
from ratchet.secrets import without_secrets
from ratchet.tracing import Fact, RolloutTrace
from store.engines import EngineRow
from store.sessions import SessionRow


def bind_session(row: SessionRow) -> None:
    """Add the session's ids to all further log lines of this task, and of those that it starts."""
    trace = _trace_of(row)
    structlog.contextvars.bind_contextvars(**_ids_of(row), **({} if trace is None else {"trace_id": trace.hex}))


@contextlib.contextmanager
def turn_span(row: SessionRow, prepared: PreparedCall, turn_id: int) -> Iterator[None]:
    """Run the block, which generates a turn in a task of its own, in the turn's span."""
    structlog.contextvars.bind_contextvars(turn=turn_id)
    trace = _trace_of(row)
    if trace is None:
        yield
        return
    facts = _ids_of(row) | {
        "turn_id": turn_id,
        "turn_kind": prepared.kind,
        "lane": prepared.lane,
        "dialect": prepared.request.options.dialect,
        "streams": prepared.request.options.stream,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": row.model if row.endpoint is None else row.endpoint.model,
        "gen_ai.request.max_tokens": prepared.max_tokens,
    }
    with tracing.rollout_span(trace, row.attempt, "turn", facts):
        yield


def _ids_of(row: SessionRow) -> dict[str, Fact]:
    return {"run_id": row.run_id, "rollout_id": row.rollout_id, "attempt": row.attempt}


def _trace_of(row: SessionRow) -> RolloutTrace | None:
    """Return the trace of the session's rollout, None if nothing is traced."""
    if not tracing.is_on() or row.installation is None:
        return None
    return RolloutTrace.of(row.installation, row.rollout_id)


def note_answer(answer: Answer) -> None:
    """Add the answer's numbers of tokens to the turn's span."""
    tracing.add_facts(
        {
            "gen_ai.usage.input_tokens": answer.prompt_tokens,
            "gen_ai.usage.output_tokens": answer.completion_tokens,
            "cached_tokens": answer.cached_tokens,
            "finish": answer.finish,
        }
    )


def engine_span(engine: EngineRow, version: str | None, request_id: str) -> contextlib.AbstractContextManager[Span]:
    """Run a request to an engine in a span, of which vLLM's own span is a child."""
    facts: dict[str, Fact] = {
        "engine_id": engine.id,
        "engine": engine.address,
        "policy_version": version,
        "request_id": request_id,
    }
    return tracing.span("engine request", facts, SpanKind.CLIENT)


def endpoint_span(url: str) -> contextlib.AbstractContextManager[Span]:
    """Run a request to an endpoint in a span. The endpoint, which others run, is not told the trace's id."""
    return tracing.span("endpoint request", {"endpoint": without_secrets(url)}, SpanKind.CLIENT)
