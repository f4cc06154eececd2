"""The page of what a run costs: rollout-hours by phase, the cost of a trained token, boxes and engines over time."""

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from reads.advice import SETTINGS, Advice, advise_run
from reads.run_times import CallUse, read_call_use, read_run_times
from reads.runs import read_run_head
from viewer.models.charts import Chart
from viewer.models.use_charts import NUM_PARTS, use_charts, use_window
from viewer.rendering import respond
from viewer.routes.registration import found, page_route

cost_pages = APIRouter()
MAX_STEPS = 200
"""All rollouts, boxes and calls of the steps are read."""


@dataclass(slots=True, frozen=True)
class PhaseLine:
    """A phase of rollouts, in rollout-hours. `cause_hours`: with waiting counted for what is waited for. `setting`:
    what changes it."""

    name: str
    hours: float
    share: float
    cause_hours: float
    cause_share: float
    setting: str


@dataclass(slots=True, frozen=True)
class CostPage:
    """The same figures as `ratchet explain --advice`. The costs are per million trained tokens; None without any."""

    run_id: str
    steps_wanted: int
    max_steps: int
    advice: Advice
    phases: list[PhaseLine]
    box_hours_per_million: float | None
    wall_hours_per_million: float | None
    sampled_per_trained: float | None
    wasted_share: float | None
    charts: list[Chart]


@page_route(cost_pages, "/runs/{run_id}/costs")
async def show_costs(request: Request, run_id: str, steps: Annotated[int, Query(ge=1, le=MAX_STEPS)] = 5) -> Response:
    """`steps`: how many of the newest trained steps are looked at."""
    async with request.app.state.store.read() as connection:
        found(await read_run_head(connection, run_id), f"run {run_id}")
        times = await read_run_times(connection, run_id, steps)
        window = use_window(times)
        calls: list[CallUse] = []
        if window is not None:
            ids = [one.rollout_id for one in times.rollouts]
            calls = await read_call_use(connection, ids, window.start, window.end, NUM_PARTS)

    def compute() -> CostPage:
        charts = [] if window is None else use_charts(times, window, calls)
        return cost_page(run_id, steps, advise_run(times), charts)

    # In a thread, so that other requests go on: a step may have hundreds of rollouts.
    return await respond(request, "costs.html", await asyncio.to_thread(compute))


def cost_page(run_id: str, steps: int, advice: Advice, charts: list[Chart]) -> CostPage:
    total = sum(advice.hours.values())
    phases = []
    for name in sorted({*advice.hours, *advice.causes}, key=lambda one: -advice.hours.get(one, 0.0)):
        hours = advice.hours.get(name, 0.0)
        cause_hours = advice.causes.get(name, 0.0)
        phases.append(PhaseLine(name, hours, hours / total, cause_hours, cause_hours / total, SETTINGS[name]))
    figures = advice.as_json()
    return CostPage(
        run_id,
        steps,
        MAX_STEPS,
        advice,
        phases,
        figures["box_hours_per_million_trained_tokens"],
        figures["wall_hours_per_million_trained_tokens"],
        figures["sampled_tokens_per_trained_token"] if advice.num_trained_tokens else None,
        advice.wasted_hours / total if total else None,
        charts,
    )
