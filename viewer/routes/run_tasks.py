"""The page of a run's tasks: which ones gave nothing to train, and why."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from reads.run_tasks import RunTask, list_run_tasks
from reads.runs import read_run_head
from viewer.rendering import respond
from viewer.routes.registration import found, page_route

run_task_pages = APIRouter()
_MAX_TASKS = 500


@dataclass(slots=True, frozen=True)
class TaskLine:
    """`why`: the reason for which no group of the task was trained; empty if one was."""

    task: RunTask
    why: str


@dataclass(slots=True, frozen=True)
class RunTasksPage:
    """`silent`: tasks of which no group was trained. `is_cut`: only the tasks that gave least to train are listed."""

    run_id: str
    silent: list[TaskLine]
    useful: list[TaskLine]
    is_cut: bool


@page_route(run_task_pages, "/runs/{run_id}/tasks")
async def show_run_tasks(request: Request, run_id: str) -> Response:
    async with request.app.state.store.read() as connection:
        found(await read_run_head(connection, run_id), f"run {run_id}")
        tasks = await list_run_tasks(connection, run_id, _MAX_TASKS + 1)
    lines = [TaskLine(one, why_untrained(one)) for one in tasks[:_MAX_TASKS]]
    silent = [one for one in lines if not one.task.num_trained]
    page = RunTasksPage(run_id, silent, [one for one in lines if one.task.num_trained], len(tasks) > _MAX_TASKS)
    return await respond(request, "run_tasks.html", page)


def why_untrained(task: RunTask) -> str:
    """Return why no step has trained a group of this task; empty if one has."""
    if task.num_trained:
        return ""
    if not task.num_ended:
        return "no rollout has ended yet"
    if task.lowest is None or task.highest is None:
        return "no rollout has a verdict"
    if task.lowest == task.highest:
        rejected = f"; {task.num_rejected} of them rejected by a rule" if task.num_rejected else ""
        return f"all {task.num_graded} rewards so far are {task.lowest:g}{rejected}"
    if not task.num_untrained and task.num_cancelled == task.num_groups:
        return "its groups were cancelled"
    if not task.num_untrained:
        return "no step has used a group of it yet"
    return "rewards differ between its groups, but not within a group that a step could train"
