"""The page of a training step: what entered it, how it was weighed, and the tokens behind its ratios."""

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
from viewer.routes.registration import found, page_route

step_pages = APIRouter()


@dataclass(slots=True, frozen=True)
class StepPage:
    """`largest_ratios`: as the learner recorded them, equal tokens of equal commands together; empty before the step is
    trained. `discarded`: earlier plans of the step. `no_shares`: why no member has a share, else empty."""

    run: RunHead
    step: StepHead
    metrics: Metrics
    groups: Sequence[GroupLine]
    members: Sequence[StepMember]
    no_shares: str
    largest_ratios: list[RatioTokenGroup]
    discarded: Sequence[DiscardedPlan]
    previous: int | None
    next: int | None


@page_route(step_pages, "/runs/{run_id}/steps/{step}")
async def show_step(request: Request, run_id: str, step: int) -> Response:
    async with request.app.state.store.read() as connection:
        head = found(await read_run_head(connection, run_id), f"run {run_id}")
        facts = found(await read_step_facts(connection, run_id, step), f"step {step} of run {run_id}")
        near = await times_by_step(connection, run_id, step - 1, step + 1)
    tokenizer = await asyncio.to_thread(load_tokenizer, head.model_path)
    page = StepPage(
        head,
        facts.step,
        facts.metrics,
        facts.groups,
        facts.members,
        facts.no_shares,
        group_ratio_tokens(facts.ratio_tokens(tokenizer)),
        facts.discarded,
        step - 1 if step - 1 in near else None,
        step + 1 if step + 1 in near else None,
    )
    return await respond(request, "step.html", page)
