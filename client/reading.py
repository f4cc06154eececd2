"""The queries behind `ReadOnlyClient` that take several views of the store together."""

import asyncio
from dataclasses import asdict

from sqlalchemy.ext.asyncio import AsyncConnection

from client.answers import without
from ratchet.errors import ConfigError
from ratchet.types import JsonObject
from reads.conversation import MessageView, TurnView, read_conversation
from reads.curves import metrics_by_step, newest_metric_step
from reads.evaluations import evaluation_rates
from reads.explanations import explain_thing
from reads.groups import count_groups_by_progress
from reads.loss_shares import loss_shares
from reads.rollout_list import lines_of_ids
from reads.rollouts import (
    planned_uses,
)
from reads.runs import count_failures, count_outcomes, list_flagged, list_groups_of_step, read_run_head
from reads.step_tokens import TokenContext, view_ratio_tokens
from reads.steps import read_step_head, read_step_tokens
from reads.tokenizer import load_tokenizer
from reads.turns import read_turns
from store import open_runs
from store.engines import list_engines
from store.open_rollouts import count_open_rollouts, list_slowest
from store.steering import list_steering

_NUM_STEPS = 5
_MAX_LISTED = 10


async def require_run(connection: AsyncConnection, run: str | None) -> str:
    """Return the run's id, without a name that of the newest. Raises ConfigError if it does not exist."""
    found = run or await open_runs.newest_run(connection)
    if found is None:
        raise ConfigError("there is no run yet; `ratchet train CONFIG` starts one")
    if await read_run_head(connection, found) is None:
        raise ConfigError(f"there is no run {found!r}; `runs` lists those that there are")
    return found


async def read_situation(connection: AsyncConnection, run_id: str) -> JsonObject:
    head = await read_run_head(connection, run_id)
    assert head is not None
    last = await newest_metric_step(connection, run_id)
    open_rollouts = {
        "by_stage": await count_open_rollouts(connection, run_id),
        "slowest": await list_slowest(connection, run_id, _MAX_LISTED),
    }
    return {
        "run": without(asdict(head), "config"),
        "explained": await explain_thing(connection, run_id),
        "open": open_rollouts,
        "outcomes": await count_outcomes(connection, run_id),
        "failures": await count_failures(connection, run_id, _MAX_LISTED),
        "groups": await count_groups_by_progress(connection, run_id),
        "engines": await list_engines(connection, head.engine_set),
        "newest_steps": await metrics_by_step(connection, run_id, max(1, last - _NUM_STEPS + 1), last),
        "evaluations": await evaluation_rates(connection, run_id),
        "flagged": await list_flagged(connection, run_id, _MAX_LISTED),
        "requests": await list_steering(connection, run_id, _MAX_LISTED),
        "config": head.config,
    }


async def read_step(connection: AsyncConnection, run: str, step: int) -> JsonObject:
    """Return the step; `members` are all of its rollouts, those with the largest share of the loss first."""
    head = await read_step_head(connection, run, step)
    if head is None:
        raise ConfigError(f"run {run!r} has no step {step}; `metrics` lists its steps")
    uses = await planned_uses(connection, run, step)
    lines = await lines_of_ids(connection, list(uses))
    shares = loss_shares(uses, head.knobs.get("loss", {}))
    members = [
        {
            "rollout": number,
            "task": lines[number].task if number in lines else None,
            "agent_exit": lines[number].agent_exit if number in lines else None,
            "share": shares[number],
            **without(asdict(use), "step"),
        }
        for number, use in sorted(uses.items(), key=lambda item: -(shares[item[0]] or 0.0))
    ]
    groups = await list_groups_of_step(connection, run, step)
    return {
        "step": head,
        "metrics": (await metrics_by_step(connection, run, step, step)).get(step, {}),
        "groups": [without(asdict(one), "step", "purpose", "label") for one in groups],
        "members": members,
    }


async def read_largest_ratios(connection: AsyncConnection, run: str, step: int) -> list[JsonObject]:
    head = await read_run_head(connection, run)
    if head is None or await read_step_head(connection, run, step) is None:
        raise ConfigError(f"there is no step {step} of a run {run!r}; `metrics` lists a run's steps")
    tokens = await read_step_tokens(connection, run, step)
    uses = await planned_uses(connection, run, step)
    turns = await read_turns(connection, {one.turn_id for one in tokens})
    tokenizer = await asyncio.to_thread(load_tokenizer, head.model_path)
    views = view_ratio_tokens(tokens, TokenContext(uses, turns, tokenizer))
    return [asdict(one.token) | without(asdict(one), "token") for one in views]


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
