"""Turns as a coding agent reads them: short JSON objects, or one text."""

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.types import JsonObject
from reads.conversation import MessageView, TurnView, read_conversation
from reads.turns import read_turns


def describe_turn(turn: TurnView) -> JsonObject:
    """Return a turn as its reader needs it: what was new, what was answered, which tools were called."""
    answer = turn.answer
    return {
        "turn": turn.id,
        "lane": turn.lane or "main",
        "kind": turn.kind,
        "state": turn.state,
        "fork_cause": turn.fork_cause,
        "prompt_tokens": turn.prompt_tokens,
        "sampled_tokens": turn.num_sampled,
        "finish_reason": turn.finish_reason,
        "unread_call": turn.unread_call,
        "seconds": turn.seconds,
        "tool_seconds_before": turn.gap_seconds,
        "system": turn.system,
        "messages": [
            {"role": one.role, "text": one.text, "result_of": one.result_of.title if one.result_of else None}
            for one in turn.messages
        ],
        "answer": None if answer is None else _describe_answer(answer),
    }


def _describe_answer(answer: MessageView) -> JsonObject:
    calls = [{"tool": one.name, "what": one.title, "body": one.body} for one in answer.tool_uses]
    return {"reasoning": answer.reasoning, "text": answer.text, "calls": calls}


async def read_turn_text(connection: AsyncConnection, turn_id: int) -> str:
    """Return everything that a turn says as one text. Raises ConfigError if it does not exist."""
    turns = await read_turns(connection, [turn_id])
    if turn_id not in turns:
        raise ConfigError(f"there is no turn {turn_id}; `turns` lists those of a rollout")
    (turn,) = read_conversation([turns[turn_id]])
    parts = [("system", turn.system), *((one.role, one.text) for one in turn.messages)]
    if turn.answer is None:
        parts.append(("no answer", f"the call is {turn.state}"))
    else:
        parts += [("reasoning", turn.answer.reasoning), ("answer", turn.answer.text)]
        parts += [(f"call of {one.name}", one.body) for one in turn.answer.tool_uses]
    return "\n".join(f"[{who}]\n{text}" for who, text in parts if text)
