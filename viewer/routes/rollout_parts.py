"""Parts of a rollout with pages of their own: its tokens, and the logs of an attempt."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from reads import rollouts
from reads.step_rows import GroupTraining, list_trainings
from reads.tokenizer import load_tokenizer
from reads.turns import ChainToken, chain_length, first_position_of_turn, read_token_window
from store.token_statistics import read_trained_turns
from viewer.models.tokens import LEGENDS, Legend, StepTraining, TokenView, view_tokens
from viewer.rendering import respond
from viewer.routes.registration import found, next_link, page_route

rollout_part_pages = APIRouter()
_PAGE_TOKENS = 1000
_OF_TRAINING = ("entropy", "ratio", "advantage")
"""Colours that tokens have only after a step has trained them."""


@dataclass(slots=True, frozen=True)
class TokenRun:
    """Consecutive tokens of one turn that are all context or all sampled."""

    turn_id: int
    sampled: bool
    tokens: list[TokenView]


@dataclass(slots=True, frozen=True)
class TokensPage:
    """A window of a chain. `trainings`: the steps that train the rollout, of this run and of runs that train on its
    stored groups; `training` is the one whose values are shown. `advantage`: of every token that it trains. `missing`:
    why tokens lack the learner's values, empty if they do not."""

    head: rollouts.RolloutHead
    chains: list[rollouts.ChainView]
    chain_no: int
    first: int
    num_tokens: int
    colour: str
    colours: list[str]
    legend: Legend
    trainings: list[GroupTraining]
    training: GroupTraining | None
    advantage: float | None
    missing: str
    has_texts: bool
    runs: list[TokenRun]
    pages: list[int]
    previous_page: str | None
    next_page: str | None


@dataclass(slots=True, frozen=True)
class AttemptLogsPage:
    head: rollouts.RolloutHead
    attempt: int
    workspace_log: str
    transcript: str


@page_route(rollout_part_pages, "/rollouts/{rollout_id}/tokens")
async def show_tokens(
    request: Request,
    rollout_id: int,
    chain: Annotated[int, Query(ge=0)] = 0,
    first: Annotated[int, Query(ge=0)] = 0,
    colour: str = "mask",
    turn: int | None = None,
    position: Annotated[int | None, Query(ge=0)] = None,
    trained_by: str | None = None,
) -> Response:
    """`turn`: show a chain with this turn, from the first token that it sampled, or from the one at `position`.
    `trained_by`: the run with the step whose values are shown; by default that of the first step that trained it."""
    if colour not in LEGENDS:
        raise HTTPException(422, f"colour is one of {', '.join(LEGENDS)}, not {colour[:40]!r}")
    async with request.app.state.store.read() as connection:
        head = found(await rollouts.read_rollout_head(connection, rollout_id), f"rollout {rollout_id}")
        if turn is not None:
            at = await first_position_of_turn(connection, rollout_id, turn)
            place = found(at, f"a chain with tokens of turn {turn}")
            shown = place[1] if position is None else position
            start = shown // _PAGE_TOKENS * _PAGE_TOKENS
            link = next_link(request, chain=place[0], first=start, turn=None, position=None)
            return RedirectResponse(f"{link}#token-{shown}", 303)
        chains = await rollouts.list_chains(connection, rollout_id)
        length = await chain_length(connection, rollout_id, chain)
        if length is None and chains:
            raise HTTPException(404, f"chain {chain} of rollout {rollout_id} does not exist")
        window = await read_token_window(connection, rollout_id, chain, first, _PAGE_TOKENS)
        trainings = await list_trainings(connection, head.group_id) if head.group_id is not None else []
        training = _choose(trainings, trained_by)
        use, trained = await _read_training(connection, training, rollout_id, window)
    tokenizer = await asyncio.to_thread(load_tokenizer, head.model_path)
    total = length or 0
    page = TokensPage(
        head=head,
        chains=chains,
        chain_no=chain,
        first=first,
        num_tokens=total,
        colour=colour,
        colours=list(LEGENDS),
        legend=LEGENDS[colour],
        trainings=trainings,
        training=training,
        advantage=use.advantage if use and use.num_tokens else None,
        missing=_why_missing(colour, training, use, trained, window),
        has_texts=tokenizer is not None,
        runs=_runs(view_tokens(window, colour, tokenizer, trained)),
        pages=list(range(0, total, _PAGE_TOKENS)),
        previous_page=next_link(request, first=max(0, first - _PAGE_TOKENS)) if first else None,
        next_page=next_link(request, first=first + _PAGE_TOKENS) if first + _PAGE_TOKENS < total else None,
    )
    return await respond(request, "tokens.html", page)


def _choose(trainings: Sequence[GroupTraining], trained_by: str | None) -> GroupTraining | None:
    """Return the step whose values are shown: that of the run `trained_by`, or the first. Raises a 404."""
    if trained_by is None:
        return trainings[0] if trainings else None
    chosen = next((one for one in trainings if one.run_id == trained_by), None)
    return found(chosen, f"a step of run {trained_by} that trains this rollout")


class _Trained(NamedTuple):
    """The plan's use of the rollout, and what the learner saw; None if the step does not use or has not trained it."""

    use: rollouts.PlannedUse | None
    training: StepTraining | None


async def _read_training(
    connection: AsyncConnection, training: GroupTraining | None, rollout_id: int, window: Sequence[ChainToken]
) -> _Trained:
    if training is None:
        return _Trained(None, None)
    use = (await rollouts.planned_uses(connection, training.run_id, training.step)).get(rollout_id)
    if use is None or not use.num_tokens or training.stepped_at is None:
        return _Trained(use, None)
    turn_ids = {one.turn_id for one in window if one.trained}
    turns = await read_trained_turns(connection, training.run_id, training.step, turn_ids)
    return _Trained(use, StepTraining(use.advantage, training.min_policy_step, turns))


def _why_missing(
    colour: str,
    training: GroupTraining | None,
    use: rollouts.PlannedUse | None,
    trained: StepTraining | None,
    window: Sequence[ChainToken],
) -> str:
    """Return why the tokens lack what `colour` shows; empty if they have it."""
    if colour not in _OF_TRAINING or not window:
        return ""
    if training is None:
        return "No step has trained this rollout."
    step = f"Step {training.step} of run {training.run_id}"
    if use is None or not use.num_tokens:
        return f"{step} has trained this rollout's group, but no token of this rollout."
    if trained is None:
        return f"{step} is planned and has not trained these tokens yet."
    if not any(one.trained for one in window):
        return "None of the tokens shown here is trained: they were read, or are left out of the loss."
    if colour != "advantage" and not trained.turns:
        return f"{step} trained none of these tokens: they are older than the step's bound."
    return ""


def _runs(tokens: list[TokenView]) -> list[TokenRun]:
    runs: list[TokenRun] = []
    for token in tokens:
        if not runs or (runs[-1].turn_id, runs[-1].sampled) != (token.turn_id, token.sampled):
            runs.append(TokenRun(token.turn_id, token.sampled, []))
        runs[-1].tokens.append(token)
    return runs


@page_route(rollout_part_pages, "/rollouts/{rollout_id}/attempts/{attempt}")
async def show_attempt_logs(request: Request, rollout_id: int, attempt: int) -> Response:
    async with request.app.state.store.read() as connection:
        head = found(await rollouts.read_rollout_head(connection, rollout_id), f"rollout {rollout_id}")
        logs = await rollouts.read_attempt_logs(connection, rollout_id, attempt)
    return await respond(request, "attempt.html", AttemptLogsPage(head, attempt, *logs))
