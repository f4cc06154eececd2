"""Pages of a run beside its own: its versions with their times, what people asked of it, its agents' commands."""

import asyncio
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from ratchet.store.views import command_views, run_views, steering_views, version_views
from ratchet.store.views.steering_views import SteeringLine
from ratchet.store.views.version_views import VersionLine
from viewer.models.commands import CommandCount, count_commands
from viewer.rendering import respond
from viewer.routes.registration import found, next_link, page_route

run_history_pages = APIRouter()
_PAGE_VERSIONS = 200
_MAX_ROLLOUTS = 100
_MAX_TURNS = 2000


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
    """`step`: only rollouts of groups that this step consumed are counted, None: of the whole run. `by_line`: commands
    are counted by their first lines, not by their first words. `num_turns`: of these rollouts; `is_cut`: older
    rollouts are not counted."""

    run_id: str
    step: int | None
    by_line: bool
    num_unsolved: int
    num_solved: int
    num_turns: int
    is_cut: bool
    commands: list[CommandCount]


@page_route(run_history_pages, "/runs/{run_id}/versions")
async def show_versions(request: Request, run_id: str, before: int | None = None) -> Response:
    """`before`: only versions of earlier steps."""
    async with request.app.state.store.read() as connection:
        found(await run_views.read_run_head(connection, run_id), f"run {run_id}")
        versions = await version_views.published_versions(connection, run_id, _PAGE_VERSIONS, before)
    more = next_link(request, before=versions[-1].step) if len(versions) == _PAGE_VERSIONS else None
    return await respond(request, "versions.html", VersionsPage(run_id, versions, more))


@page_route(run_history_pages, "/runs/{run_id}/steering")
async def show_steering(request: Request, run_id: str) -> Response:
    async with request.app.state.store.read() as connection:
        found(await run_views.read_run_head(connection, run_id), f"run {run_id}")
        requests = await steering_views.list_requests(connection, run_id)
    return await respond(request, "steering.html", SteeringPage(run_id, requests))


@page_route(run_history_pages, "/runs/{run_id}/commands")
async def show_commands(request: Request, run_id: str, step: int | None = None, by_line: bool = False) -> Response:
    async with request.app.state.store.read() as connection:
        found(await run_views.read_run_head(connection, run_id), f"run {run_id}")
        rollouts = await command_views.list_judged_rollouts(connection, run_id, step, _MAX_ROLLOUTS + 1)
        has_more = len(rollouts) > _MAX_ROLLOUTS
        rollouts = rollouts[:_MAX_ROLLOUTS]
        answers = await command_views.read_packed_answers(
            connection, [one.rollout_id for one in rollouts], _MAX_TURNS + 1
        )
    is_cut = has_more or len(answers) > _MAX_TURNS
    if len(answers) > _MAX_TURNS:  # a rollout of which some answers were not read may have run any command
        partly = answers[-1].rollout_id
        rollouts = [one for one in rollouts if one.rollout_id > partly]
        answers = [one for one in answers if one.rollout_id > partly]
    commands = await asyncio.to_thread(count_commands, rollouts, answers, by_line)
    num_solved = sum(one.solved for one in rollouts)
    page = CommandsPage(run_id, step, by_line, len(rollouts) - num_solved, num_solved, len(answers), is_cut, commands)
    return await respond(request, "commands.html", page)
