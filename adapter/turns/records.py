"""A call as the columns of its row: when it is opened, and when it is completed.

Why here: what is kept of a call, and in which form, is one question; when it is written is another (`capture.py`).
Called by: `capture.py`.
"""

from hashlib import blake2b

from adapter.conversation import Answer, answer_to_json, message_to_json
from adapter.prompt.prompt_builder import PreparedCall
from engine.client import Generation
from ratchet.store.arrays import ids_to_bytes, logprobs_to_bytes, pack_json
from ratchet.store.sessions import SessionRow
from ratchet.store.turns import CompletedTurn, NewTurn

_LANE_CHARS = 100


def new_turn(session: SessionRow, prepared: PreparedCall, ordinal: int, process: str) -> NewTurn:
    """`ordinal`: how many times this very request was answered before."""
    join = prepared.join
    return NewTurn(
        session_id=session.id,
        rollout_id=session.rollout_id,
        attempt=session.attempt,
        lane=lane_key(prepared.lane),
        digest=prepared.digest,
        ordinal=ordinal,
        kind=prepared.kind,
        parent_turn_id=join.parent_turn_id,
        kept_tokens=join.kept_tokens,
        fork_cause=prepared.fork_cause,
        dialect=prepared.reading.wishes.dialect,
        prompt_tokens=prepared.stream.length,
        suffix_ids=ids_to_bytes(prepared.suffix),
        temperature=session.temperature,
        request=pack_json(_request(prepared)),
        engine_id=prepared.engine_id,
        lease_owner=process,
    )


def completed_turn(
    session: SessionRow, answer: Answer, generation: Generation, engine_id: int, waited_seconds: float
) -> CompletedTurn:
    """`waited_seconds`: of the time that the call took, how long there was no engine that worked on it."""
    return CompletedTurn(
        id=answer.turn_id,
        session_id=session.id,
        sampled_ids=ids_to_bytes(generation.token_ids),
        logprobs=logprobs_to_bytes(generation.logprobs),
        num_sampled=len(generation.token_ids),
        logprobs_valid=generation.logprobs_valid,
        version_spans=generation.version_spans,
        finish_reason=generation.finish_reason,
        answer=pack_json(answer_to_json(answer)),
        engine_id=engine_id,
        engine_wait_seconds=waited_seconds,
    )


def lane_key(lane: str) -> str:
    """As it is stored: a client may send anything, and an index holds no long texts."""
    return lane if len(lane) <= _LANE_CHARS else blake2b(lane.encode(), digest_size=16).hexdigest()


def _request(prepared: PreparedCall) -> dict[str, object]:
    """What the row keeps of a request: what is new in it, and what another process needs to go on from it."""
    head, new = prepared.reading.head, [message for unit in prepared.new_units for message in unit.messages]
    request: dict[str, object] = {
        "after": prepared.after,
        "messages": [message_to_json(message) for message in new],
        "keys": [key.hex() for key in prepared.new_keys],
        "thinks": prepared.thinks,
        "max_tokens": prepared.max_tokens,
    }
    return request if prepared.after is not None else request | {"system": head.system, "tools": head.tools}
