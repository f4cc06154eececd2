"""The page of a training step: what entered it, how it was weighed, and the tokens behind its ratios."""

import asyncio
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from reads.curves import Metrics, metrics_by_step, times_by_step
from reads.loss_shares import loss_shares, why_no_shares
from reads.rollout_list import RolloutLine, lines_of_ids
from reads.rollouts import PlannedUse, planned_uses
from reads.runs import GroupLine, RunHead, list_groups_of_step, read_run_head
from reads.step_tokens import (
    RatioTokenGroup,
    TokenContext,
    group_ratio_tokens,
    view_ratio_tokens,
)
from reads.steps import DiscardedPlan, StepHead, discarded_plans, read_step_head, read_step_tokens
from reads.tokenizer import load_tokenizer
from reads.turns import read_turns
from viewer.rendering import respond
from viewer.routes.registration import found, page_route

step_pages = APIRouter()


@dataclass(slots=True, frozen=True)
class StepMember:
    """A rollout of the step. `share`: of the loss, see `loss_shares`."""

    rollout: RolloutLine
    use: PlannedUse
    share: float | None


@dataclass(slots=True, frozen=True)
class StepPage:
    """`largest_ratios`: as the learner recorded them, equal tokens of equal commands together; empty before the step is
    trained. `discarded`: earlier plans of the step. `no_shares`: why no member has a share, else empty."""

    run: RunHead
    step: StepHead
    metrics: Metrics
    groups: list[GroupLine]
    members: list[StepMember]
    no_shares: str
    largest_ratios: list[RatioTokenGroup]
    discarded: list[DiscardedPlan]
    previous: int | None
    next: int | None


@page_route(step_pages, "/runs/{run_id}/steps/{step}")
async def show_step(request: Request, run_id: str, step: int) -> Response:
    async with request.app.state.store.read() as connection:
        head = found(await read_run_head(connection, run_id), f"run {run_id}")
        plan = found(await read_step_head(connection, run_id, step), f"step {step} of run {run_id}")
        metrics = (await metrics_by_step(connection, run_id, step, step)).get(step, {})
        uses = await planned_uses(connection, run_id, step)
        lines = await lines_of_ids(connection, list(uses))
        loss = plan.knobs.get("loss", {})
        shares = loss_shares(uses, loss)
        members = [StepMember(lines[one], use, shares[one]) for one, use in uses.items() if one in lines]
        members.sort(key=lambda one: -(one.share or 0.0))
        recorded = await read_step_tokens(connection, run_id, step)
        turns = await read_turns(connection, {one.turn_id for one in recorded})
        near = await times_by_step(connection, run_id, step - 1, step + 1)
        groups = await list_groups_of_step(connection, run_id, step)
        discarded = await discarded_plans(connection, run_id, step)
    tokenizer = await asyncio.to_thread(load_tokenizer, head.model_path)
    context = TokenContext(uses, turns, tokenizer)
    page = StepPage(
        head,
        plan,
        metrics,
        groups,
        members,
        why_no_shares(uses, loss),
        group_ratio_tokens(view_ratio_tokens(recorded, context)),
        discarded,
        step - 1 if step - 1 in near else None,
        step + 1 if step + 1 in near else None,
    )
    return await respond(request, "step.html", page)
