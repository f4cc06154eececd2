"""The page of a task: its rollouts over time, its solve rate, its admissions and verdicts that contradict."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from reads import tasks
from reads.rollout_list import RolloutFilter, RolloutLine, list_rollout_lines
from viewer.rendering import respond
from viewer.routes.registration import found, page_route

task_pages = APIRouter()
_NEWEST = 50
_MAX_CONTRADICTIONS = 20


@dataclass(slots=True, frozen=True)
class TaskPage:
    """`num_graded` and `mean_reward`: over all runs. `has_more_contradictions`: than are listed."""

    task: tasks.TaskHead
    num_rollouts: int
    num_graded: int
    mean_reward: float | None
    rates: list[tasks.TaskPolicyRate]
    admissions: list[tasks.AdmissionView]
    contradictions: list[tasks.ContradictingPatch]
    has_more_contradictions: bool
    newest: list[RolloutLine]


@page_route(task_pages, "/tasks/{task_id}")
async def show_task_page(request: Request, task_id: int) -> Response:
    async with request.app.state.store.read() as connection:
        head = found(await tasks.read_task_head(connection, task_id), f"task {task_id}")
        rates = await tasks.task_rates(connection, task_id)
        graded = sum(one.num_graded for one in rates)
        total = sum((one.mean or 0.0) * one.num_graded for one in rates)
        contradictions = await tasks.contradicting_patches(connection, task_id, _MAX_CONTRADICTIONS + 1)
        page = TaskPage(
            head,
            sum(one.num_rollouts for one in rates),
            graded,
            total / graded if graded else None,
            rates,
            await tasks.list_admissions(connection, task_id),
            contradictions[:_MAX_CONTRADICTIONS],
            len(contradictions) > _MAX_CONTRADICTIONS,
            await list_rollout_lines(connection, RolloutFilter(task_id=task_id), _NEWEST),
        )
    return await respond(request, "task.html", page)
