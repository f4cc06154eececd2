"""The page of a training step: what entered it, how it was weighed, and on demand the tokens behind its ratios."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from reads.curves import Metrics, times_by_step
from reads.groups import GroupLine
from reads.runs import RunHead, read_run_head
from reads.step_rows import DiscardedPlan, StepHead
from reads.steps import RatioTokenGroup, StepMember, group_ratio_tokens, read_step_facts
from reads.tokenizer import load_tokenizer
from viewer.rendering import respond
from viewer.routes.registration import found, next_link, page_route

step_pages = APIRouter()
_PAGE_MEMBERS = 50


@dataclass(slots=True, frozen=True)
class StepPage:
    """`num_tokens`: of the tokens with the largest ratios that the learner has recorded; `largest_ratios`: these, if
    asked for, equal tokens of equal commands together. `discarded`: earlier plans of the step. `members`: the page of
    `num_members` that begins at the place `first`; `no_shares`: why none has a share, else empty."""

    run: RunHead
    step: StepHead
    metrics: Metrics
    groups: Sequence[GroupLine]
    members: Sequence[StepMember]
    num_members: int
    first: int
    no_shares: str
    num_tokens: int
    largest_ratios: list[RatioTokenGroup]
    discarded: Sequence[DiscardedPlan]
    previous: int | None
    next: int | None
    previous_page: str | None
    next_page: str | None


@page_route(step_pages, "/runs/{run_id}/steps/{step}")
async def show_step(
    request: Request, run_id: str, step: int, first: int = 0, rollout: int | None = None, tokens: bool = False
) -> Response:
    """`first`: the place of the first rollout of the page, from 0. `rollout`: show the page with this one instead.
    `tokens`: show those with the largest ratios."""
    is_export = request.app.state.settings.is_export
    size = 10_000 if is_export else _PAGE_MEMBERS
    async with request.app.state.store.read() as connection:
        head = found(await read_run_head(connection, run_id), f"run {run_id}")
        facts = await read_step_facts(connection, run_id, step, max(0, first), size, rollout)
        facts = found(facts, f"step {step} of run {run_id}")
        near = await times_by_step(connection, run_id, step - 1, step + 1)
    ratios: list[RatioTokenGroup] = []
    if tokens or is_export:
        tokenizer = await asyncio.to_thread(load_tokenizer, head.model_path)
        ratios = group_ratio_tokens(facts.ratio_tokens(tokenizer))
    at, number = facts.first, len(facts.uses)
    page = StepPage(
        head,
        facts.step,
        facts.metrics,
        facts.groups,
        facts.members,
        number,
        at,
        facts.no_shares,
        len(facts.tokens),
        ratios,
        facts.discarded,
        step - 1 if step - 1 in near else None,
        step + 1 if step + 1 in near else None,
        next_link(request, first=max(0, at - size), rollout=None) if at else None,
        next_link(request, first=at + size, rollout=None) if at + size < number else None,
    )
    return await respond(request, "step.html", page)
