"""Pages of a run beside its own: versions, requests of people, commands of agents, tasks and costs."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from ratchet.bounded_numbers import ADVICE_STEPS
from ratchet.types import JsonObject, Purpose
from reads.advice import SETTINGS, advise_run
from reads.commands import CommandCount, count_commands, read_packed_answers, sample_judged_rollouts, within_turns
from reads.run_tasks import RunTask, list_run_tasks
from reads.run_times import CallUse, read_call_use, read_run_times
from reads.runs import read_run_head
from reads.steering import SteeringLine, list_requests
from reads.versions import VersionLine, published_versions
from viewer.models.run_lanes import NUM_PARTS, run_lanes, use_window
from viewer.models.timeline import TimeLane
from viewer.rendering import respond
from viewer.routes.registration import found, next_link, page_route, read_number

run_history_pages = APIRouter()
_PAGE_VERSIONS = 200
_MAX_ROLLOUTS = 1000
_MAX_TURNS = 20_000
_MAX_TASKS = 500
MAX_STEPS = 200
"""All rollouts, boxes and calls of the steps are read."""


@dataclass(slots=True, frozen=True)
class VersionsPage:
    run_id: str
    versions: list[VersionLine]
    next_page: str | None


@dataclass(slots=True, frozen=True)
class SteeringPage:
    run_id: str
    requests: list[SteeringLine]


@dataclass(slots=True, frozen=True)
class CommandsPage:
    """`step`: only rollouts of groups that this step consumed are counted, None: of the whole run. `purpose`: only
    training or evaluation rollouts; None: both. `by_line`: commands are counted by their first lines, not by their
    first words. `num_judged`: rollouts with a verdict, of which `num_unsolved` and `num_solved` are counted, evenly
    spread; `num_turns`: of these, of `max_turns` that may be read."""

    run_id: str
    step: int | None
    purpose: Purpose | None
    by_line: bool
    max_turns: int
    num_judged: int
    num_unsolved: int
    num_solved: int
    num_turns: int
    commands: list[CommandCount]


@page_route(run_history_pages, "/runs/{run_id}/versions")
async def show_versions(request: Request, run_id: str, before: int | None = None) -> Response:
    """`before`: only versions of earlier steps."""
    async with request.app.state.store.read() as connection:
        found(await read_run_head(connection, run_id), f"run {run_id}")
        versions = await published_versions(connection, run_id, _PAGE_VERSIONS, before)
    more = next_link(request, before=versions[-1].step) if len(versions) == _PAGE_VERSIONS else None
    return await respond(request, "versions.html", VersionsPage(run_id, versions, more))


@page_route(run_history_pages, "/runs/{run_id}/steering")
async def show_steering(request: Request, run_id: str) -> Response:
    async with request.app.state.store.read() as connection:
        found(await read_run_head(connection, run_id), f"run {run_id}")
        requests = await list_requests(connection, run_id)
    return await respond(request, "steering.html", SteeringPage(run_id, requests))


@page_route(run_history_pages, "/runs/{run_id}/commands")
async def show_commands(
    request: Request,
    run_id: str,
    step: str = "",
    purpose: Literal["", "train", "eval"] = "",
    by_line: bool = False,
    turns: Annotated[int, Query(ge=1, le=_MAX_TURNS)] = 2000,
) -> Response:
    """`turns`: at most so many are read; fewer rollouts are counted if theirs are more."""
    of_step = read_number(int, "step", step)
    only = Purpose(purpose) if purpose else None
    async with request.app.state.store.read() as connection:
        found(await read_run_head(connection, run_id), f"run {run_id}")
        sample = await sample_judged_rollouts(connection, run_id, of_step, only, _MAX_ROLLOUTS)
        counted = within_turns(sample.rollouts, turns)
        answers = await read_packed_answers(connection, [one.rollout_id for one in counted])
    commands = await asyncio.to_thread(count_commands, counted, answers, by_line)
    num_solved = sum(one.solved for one in counted)
    counts = (sample.number, len(counted) - num_solved, num_solved, len(answers))
    page = CommandsPage(run_id, of_step, only, by_line, turns, *counts, commands)
    return await respond(request, "commands.html", page)


@dataclass(slots=True, frozen=True)
class TaskLine:
    """`why`: the reason for which no group of the task was trained; empty if one was."""

    task: RunTask
    why: str


@dataclass(slots=True, frozen=True)
class RunTasksPage:
    """`silent`: tasks that gave nothing to train; `waiting`: those whose groups are all open or wait for a step.
    `is_cut`: only the tasks that gave least to train are listed."""

    run_id: str
    silent: list[TaskLine]
    waiting: list[TaskLine]
    useful: list[TaskLine]
    is_cut: bool


@page_route(run_history_pages, "/runs/{run_id}/tasks")
async def show_run_tasks(request: Request, run_id: str) -> Response:
    async with request.app.state.store.read() as connection:
        head = found(await read_run_head(connection, run_id), f"run {run_id}")
        tasks = await list_run_tasks(connection, run_id, _MAX_TASKS + 1)
    lines = [TaskLine(one, why_untrained(one, head.ended_at is not None)) for one in tasks[:_MAX_TASKS]]
    silent = [one for one in lines if one.task.is_silent]
    waiting = [one for one in lines if one.why and not one.task.is_silent]
    useful = [one for one in lines if not one.why]
    page = RunTasksPage(run_id, silent, waiting, useful, len(tasks) > _MAX_TASKS)
    return await respond(request, "run_tasks.html", page)


def why_untrained(task: RunTask, has_run_ended: bool) -> str:
    """Return why no step has trained a group of this task; empty if one has."""
    if task.num_trained:
        return ""
    if not task.num_ended:
        return "no rollout has ended yet"
    if task.lowest is None or task.highest is None:
        return "no rollout has a verdict"
    if task.lowest == task.highest:
        rejected = f"; {task.num_rejected} of them rejected by a rule" if task.num_rejected else ""
        so_far = "" if has_run_ended else " so far"
        return f"all {task.num_graded} rewards{so_far} are {task.lowest:g}{rejected}"
    if not task.num_untrained and task.num_cancelled == task.num_groups:
        return "its groups were cancelled"
    if not task.num_untrained:
        return "no step has used a group of it yet"
    return "rewards differ between its groups, but not within a group that a step could train"


@dataclass(slots=True, frozen=True)
class CostPage:
    """`advice`: as `ratchet explain --advice --json` has it. `phases`: what changes each. `hours`: of the lanes."""

    run_id: str
    steps_wanted: int
    max_steps: int
    advice: JsonObject
    phases: dict[str, str]
    hours: float
    lanes: list[TimeLane]


@page_route(run_history_pages, "/runs/{run_id}/costs")
async def show_costs(
    request: Request, run_id: str, steps: Annotated[int, Query(ge=1, le=MAX_STEPS)] = ADVICE_STEPS
) -> Response:
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
        advice = advise_run(times)
        lanes = [] if window is None else run_lanes(times, window, calls)
        hours = 0.0 if window is None else (window.end - window.start) / 3600
        names = sorted({*advice.hours, *advice.causes}, key=lambda one: -advice.hours.get(one, 0.0))
        phases = {name: SETTINGS[name] for name in names}
        return CostPage(run_id, steps, MAX_STEPS, advice.as_json(), phases, hours, lanes)

    # In a thread, so that other requests go on: a step may have hundreds of rollouts.
    return await respond(request, "costs.html", await asyncio.to_thread(compute))
