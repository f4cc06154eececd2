"""A call as the columns of its row, opened and completed, and the answer that a completed row stores."""

from adapter.conversation import Answer, answer_from_json, answer_to_json
from adapter.dialects.base import InvalidRequestError
from adapter.prompt.prompt_builder import PreparedCall
from engine.generation import Generation
from store.arrays import experts_to_bytes, ids_to_bytes, logprobs_to_bytes, pack_json, unpack_json
from store.sessions import SessionRow
from store.turns import CompletedTurn, KnownCall, NewTurn


def new_turn(row: SessionRow, prepared: PreparedCall, ordinal: int, process_id: str) -> NewTurn:
    """Return the row of a call that is opened.

    `ordinal`: how many turns of session and lane have the same digest already. Raises InvalidRequestError if the
    request is nested too deeply to be stored.
    """
    try:
        request = pack_json(_stored_request(prepared))
    except TypeError as error:
        raise InvalidRequestError(f"the messages or tools are nested too deeply ({error})") from error
    attach_point = prepared.attach_point
    return NewTurn(
        session_id=row.id,
        rollout_id=row.rollout_id,
        attempt=row.attempt,
        lane=prepared.lane,
        digest=prepared.digest,
        ordinal=ordinal,
        kind=prepared.kind,
        parent_turn_id=attach_point.parent_turn_id,
        kept_tokens=attach_point.kept_tokens,
        fork_cause=prepared.fork_cause,
        dialect=prepared.request.options.dialect,
        prompt_tokens=prepared.stream.length,
        suffix_ids=ids_to_bytes(prepared.suffix),
        temperature=row.temperature,
        request=request,
        engine_id=prepared.engine_id,
        lease_owner=process_id,
    )


def completed_turn(
    row: SessionRow, answer: Answer, generation: Generation, engine_id: int | None, waited_seconds: float
) -> CompletedTurn:
    """Return the columns of a completed call. `waited_seconds`: time of the call in which no engine worked on it."""
    experts = generation.routed_experts
    return CompletedTurn(
        id=answer.turn_id,
        session_id=row.id,
        sampled_ids=ids_to_bytes(generation.token_ids),
        logprobs=logprobs_to_bytes(generation.logprobs),
        num_sampled=len(generation.token_ids),
        logprobs_valid=generation.logprobs_valid,
        version_spans=generation.version_spans,
        finish_reason=generation.finish_reason,
        unread_call=answer.unread,
        answer=pack_json(answer_to_json(answer)),
        engine_id=engine_id,
        engine_wait_seconds=waited_seconds,
        routed_experts=None if experts is None else experts_to_bytes(experts),
    )


def stored_answer(known: KnownCall) -> Answer:
    assert known.answer is not None
    value = unpack_json(known.answer)
    assert isinstance(value, dict)
    return answer_from_json(known.id, value)


def _stored_request(prepared: PreparedCall) -> dict[str, object]:
    """The new part of a request, and what another process needs to rebuild the tree from it."""
    preamble = prepared.request.preamble
    stored: dict[str, object] = {
        "after": prepared.after_turn_id,
        "messages": prepared.new_messages,
        "keys": [key.hex() for key in prepared.new_keys],
        "loose_key": prepared.request.loose_keys[-1].hex(),
        "thinks": prepared.thinks,
        "max_tokens": prepared.max_tokens,
    }
    if num_omitted := sum(message.num_omitted for run in prepared.new_runs for message in run.messages):
        stored["omitted_media"] = num_omitted
    if prepared.after_turn_id is not None:
        return stored
    return stored | {"system": preamble.system, "tools": preamble.tools}
