"""The pages of runs: the list, one run, and the comparison of several."""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from reads.curves import (
    Metrics,
    metrics_by_step,
    newest_metric_step,
    rewards_by_step,
    times_by_step,
    trained_tokens_before,
)
from reads.evaluations import EvaluationRate, evaluation_rates
from reads.rollout_list import RolloutFilter, RolloutLine, list_rollout_lines
from reads.run_comparison import DifferentSetting, PairedEvaluation, different_settings, paired_evaluations
from reads.runs import (
    RunHead,
    RunSummary,
    VerdictCount,
    list_run_summaries,
    outcome_counts,
    read_run_head,
    reward_counts,
)
from reads.steering import list_requests
from reads.versions import list_restarts
from reads.vitals import Vitals, read_vitals
from store.open_rollouts import OpenRollout, list_slowest
from viewer.models.charts import AXES, Chart, RewardBin, RunCurves, draw_charts, reward_bins
from viewer.models.marks import ChartMark, chart_marks
from viewer.rendering import respond
from viewer.routes.registration import found, next_link, page_route

run_pages = APIRouter()
_PAGE_RUNS = 25
_MAX_BY_HAND = 10
_MAX_STEPS = 400
_MAX_REWARD_STEPS = 100
"""Steps whose rewards are read with their spread: those of all groups of a step are read for it."""
_MAX_OPEN = 200
_MAX_FLAGGED = 20
_MAX_COMPARED = 6
_MAX_REQUESTS = 200
"""The number of people's requests that are marked on the curves: the newest ones."""
NEWEST_STEPS = 20


@dataclass(slots=True, frozen=True)
class RunsPage:
    """`by_hand`: the newest runs that hold rollouts by hand; `only_by_hand`: `runs` are such."""

    runs: list[RunSummary]
    by_hand: list[RunSummary]
    has_more_by_hand: bool
    only_by_hand: bool
    next_page: str | None


@dataclass(slots=True, frozen=True)
class StepLine:
    """`reward`: the mean over all groups that the step consumed."""

    step: int
    state: str
    reward: float | None
    metrics: Metrics
    stepped_at: datetime | None


@dataclass(slots=True, frozen=True)
class RunPage:
    """`open_rollouts`: those that have been in their stage for longest. `flagged`: the newest ones with a flagged or
    rejected patch. `charts`: of the newest steps only, if there are more than fit. `marks`: on them."""

    head: RunHead
    vitals: Vitals
    is_by_hand: bool
    open_rollouts: list[OpenRollout]
    outcomes: list[VerdictCount]
    bins: list[RewardBin]
    evaluations: list[EvaluationRate]
    flagged: list[RolloutLine]
    charts: list[Chart]
    marks: list[ChartMark]
    axis: str
    first_charted_step: int
    steps: list[StepLine]


@dataclass(slots=True, frozen=True)
class ComparePage:
    """`first_charted_steps`: by run; later than 1 if only the newest steps fit."""

    runs: list[RunHead]
    first_charted_steps: dict[str, int]
    axis: str
    charts: list[Chart]
    settings: list[DifferentSetting]
    evaluations: list[PairedEvaluation]


@run_pages.get("/")
async def show_home(request: Request) -> Response:
    return RedirectResponse("/runs")


@page_route(run_pages, "/runs")
async def show_runs(request: Request, before: str | None = None, by_hand: bool = False) -> Response:
    """`before`: created_at and id of the last run of the page before, with a comma between. `by_hand`: list only runs
    that hold rollouts by hand."""
    key = None
    if before:
        moment, _, run_id = before.partition(",")
        try:
            key = (datetime.fromisoformat(moment), run_id)
        except ValueError:
            key = None
        if key is None or key[0].tzinfo is None:
            raise HTTPException(422, "`before` is not a time with its zone and a run's id with a comma between")
    async with request.app.state.store.read() as connection:
        listed = await list_run_summaries(connection, _PAGE_RUNS, key, by_hand)
        others: list[RunSummary] = []
        if not by_hand and key is None:
            others = await list_run_summaries(connection, _MAX_BY_HAND + 1, by_hand=True)
    last = listed[-1] if len(listed) == _PAGE_RUNS else None
    more = next_link(request, before=f"{last.created_at.isoformat()},{last.run_id}") if last else None
    page = RunsPage(listed, others[:_MAX_BY_HAND], len(others) > _MAX_BY_HAND, by_hand, more)
    return await respond(request, "runs.html", page)


@page_route(run_pages, "/runs/{run_id}")
async def show_run(request: Request, run_id: str, axis: str = "steps") -> Response:
    _require_axis(axis)
    async with request.app.state.store.read() as connection:
        page = await read_run_page(connection, run_id, axis)
    return await respond(request, "run.html", page)


@page_route(run_pages, "/compare")
async def show_compare(request: Request, run: Annotated[list[str], Query()], axis: str = "steps") -> Response:
    _require_axis(axis)
    if len(run) > _MAX_COMPARED:
        raise HTTPException(422, f"at most {_MAX_COMPARED} runs are compared")
    async with request.app.state.store.read() as connection:
        heads = [found(await read_run_head(connection, one), f"run {one}") for one in dict.fromkeys(run)]
        curves = [await _read_curves(connection, head, axis) for head in heads]
        evaluations = await paired_evaluations(connection, {one.run_id: one.evaluations for one in curves})
    firsts = {one.run_id: min(one.metrics, default=0) for one in curves}
    settings = different_settings([head.config for head in heads])
    page = ComparePage(heads, firsts, axis, draw_charts(curves, axis), settings, evaluations)
    return await respond(request, "compare.html", page)


def _require_axis(axis: str) -> None:
    if axis not in AXES:
        raise HTTPException(422, f"axis is one of {', '.join(AXES)}, not {axis!r}")


async def read_run_page(connection: AsyncConnection, run_id: str, axis: str) -> RunPage:
    head = found(await read_run_head(connection, run_id), f"run {run_id}")
    curves = await _read_curves(connection, head, axis)
    requests = await list_requests(connection, run_id, limit=_MAX_REQUESTS)
    vitals = await read_vitals(connection, head, curves.rewards, curves.evaluations, curves.metrics)
    rewards_of = {one.step: one.mean for one in curves.rewards}
    newest = sorted(curves.times.values(), key=lambda one: -one.step)[:NEWEST_STEPS]
    return RunPage(
        head=head,
        vitals=vitals,
        is_by_hand=head.is_by_hand,
        open_rollouts=await list_slowest(connection, run_id, _MAX_OPEN),
        outcomes=outcome_counts(vitals.verdicts),
        bins=reward_bins(run_id, reward_counts(vitals.verdicts, "train")),
        evaluations=list(curves.evaluations),
        flagged=await list_rollout_lines(connection, RolloutFilter(run_id, flagged=True), _MAX_FLAGGED),
        charts=draw_charts([curves], axis),
        marks=chart_marks(curves, requests, await list_restarts(connection, run_id), axis),
        axis=axis,
        first_charted_step=min(curves.metrics, default=0),
        steps=[
            StepLine(one.step, one.state, rewards_of.get(one.step), curves.metrics.get(one.step, {}), one.stepped_at)
            for one in newest
        ],
    )


async def _read_curves(connection: AsyncConnection, head: RunHead, axis: str) -> RunCurves:
    last = max(head.step, await newest_metric_step(connection, head.run_id))
    first = max(0, last - _MAX_STEPS + 1)
    return RunCurves(
        head.run_id,
        head.created_at,
        await metrics_by_step(connection, head.run_id, first, last),
        await times_by_step(connection, head.run_id, first, last + 1),
        await rewards_by_step(connection, head.run_id, max(1, first, last - _MAX_REWARD_STEPS + 1), last),
        await evaluation_rates(connection, head.run_id),
        await trained_tokens_before(connection, head.run_id, first) if axis == "tokens" and first else 0.0,
    )
