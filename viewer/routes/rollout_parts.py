"""Parts of a rollout with pages of their own: its tokens, and the logs of an attempt."""

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from ratchet.store.views import rollout_views, turn_views
from ratchet.store.views.rollout_views import ChainView, RolloutHead
from viewer.models.tokens import COLOURS, TokenView, load_tokenizer, view_tokens
from viewer.rendering import respond
from viewer.routes.registration import found, next_link, page_route
from viewer.routes.rollouts import read_reward_facts

rollout_part_pages = APIRouter()
_PAGE_TOKENS = 1000


@dataclass(slots=True, frozen=True)
class TokenRun:
    """Consecutive tokens of one turn that are all context or all sampled."""

    turn_id: int
    sampled: bool
    tokens: list[TokenView]


@dataclass(slots=True, frozen=True)
class TokensPage:
    """A window of a chain. `advantage`: of the rollout in the step that trains it; it holds for every trained token."""

    head: RolloutHead
    chains: list[ChainView]
    chain_no: int
    first: int
    num_tokens: int
    colour: str
    colours: list[str]
    advantage: float | None
    step: int | None
    has_texts: bool
    runs: list[TokenRun]
    pages: list[int]
    previous_page: str | None
    next_page: str | None


@dataclass(slots=True, frozen=True)
class AttemptLogsPage:
    head: RolloutHead
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
) -> Response:
    """`turn`: show a chain with this turn, from the first token that it sampled, or from the one at `position`."""
    if colour not in COLOURS:
        raise HTTPException(422, f"colour is one of {', '.join(COLOURS)}, not {colour!r}")
    async with request.app.state.store.read() as connection:
        head = found(await rollout_views.read_rollout_head(connection, rollout_id), f"rollout {rollout_id}")
        if turn is not None:
            at = await turn_views.first_position_of_turn(connection, rollout_id, turn)
            place = found(at, f"a chain with tokens of turn {turn}")
            shown = place[1] if position is None else position
            start = shown // _PAGE_TOKENS * _PAGE_TOKENS
            link = next_link(request, chain=place[0], first=start, turn=None, position=None)
            return RedirectResponse(f"{link}#token-{shown}", 303)
        chains = await rollout_views.list_chains(connection, rollout_id)
        length = await turn_views.chain_length(connection, rollout_id, chain)
        if length is None and chains:
            raise HTTPException(404, f"chain {chain} of rollout {rollout_id} does not exist")
        window = await turn_views.read_token_window(connection, rollout_id, chain, first, _PAGE_TOKENS)
        use = (await read_reward_facts(connection, head)).use
    tokenizer = await asyncio.to_thread(load_tokenizer, head.model_path)
    advantage = use.advantage if use else None
    seen = view_tokens(window, colour, tokenizer, advantage)
    total = length or 0
    page = TokensPage(
        head=head,
        chains=chains,
        chain_no=chain,
        first=first,
        num_tokens=total,
        colour=colour,
        colours=list(COLOURS),
        advantage=advantage,
        step=use.step if use else None,
        has_texts=tokenizer is not None,
        runs=_runs(seen),
        pages=list(range(0, total, _PAGE_TOKENS)),
        previous_page=next_link(request, first=max(0, first - _PAGE_TOKENS)) if first else None,
        next_page=next_link(request, first=first + _PAGE_TOKENS) if first + _PAGE_TOKENS < total else None,
    )
    return await respond(request, "tokens.html", page)


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
        head = found(await rollout_views.read_rollout_head(connection, rollout_id), f"rollout {rollout_id}")
        logs = await rollout_views.read_attempt_logs(connection, rollout_id, attempt)
    return await respond(request, "attempt.html", AttemptLogsPage(head, attempt, *logs))
