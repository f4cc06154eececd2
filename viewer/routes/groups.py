"""The pages of groups: those of a run by what has become of them, and one group with its rollouts side by side."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ratchet.errors import ConfigError
from ratchet.types import GroupState, Purpose
from reads.conversation import FirstDifference, TurnView, first_difference, read_conversation
from reads.groups import (
    GroupCount,
    GroupFilter,
    GroupLine,
    ListedGroup,
    count_groups_by_progress,
    list_groups,
    read_group_filter,
    read_group_line,
)
from reads.rollout_list import RolloutLine, list_members
from reads.rollouts import PlannedUse, planned_uses, read_group_rewards
from reads.runs import read_run_head
from reads.steering import SteeringLine, list_requests
from reads.turns import read_turn_contents
from store.open_rollouts import stages_of
from viewer.rendering import respond
from viewer.routes.registration import found, next_link, page_route

group_pages = APIRouter()
_PAGE_GROUPS = 50
_MAX_TURNS = 12
_MAX_COLUMNS = 16


@dataclass(slots=True, frozen=True)
class GroupsPage:
    """`counts`: of all groups of the run. `only`: which ones are listed. `source_run_id`: the run whose groups it
    trains on, if it has none of its own."""

    run_id: str
    source_run_id: str | None
    only: GroupFilter
    counts: list[GroupCount]
    groups: list[ListedGroup]
    next_page: str | None


@page_route(group_pages, "/runs/{run_id}/groups")
async def show_groups(
    request: Request, run_id: str, state: str = "", purpose: str = "", before: int | None = None
) -> Response:
    """`before`: the number of the last group of the page before."""
    try:
        only = read_group_filter(state, purpose)
    except ConfigError as error:
        raise HTTPException(422, str(error)) from None
    async with request.app.state.store.read() as connection:
        head = found(await read_run_head(connection, run_id), f"run {run_id}")
        counts = await count_groups_by_progress(connection, run_id)
        groups = await list_groups(connection, run_id, only, _PAGE_GROUPS + 1, before)
    shown = groups[:_PAGE_GROUPS]
    more = next_link(request, before=shown[-1].group_no) if len(groups) > _PAGE_GROUPS else None
    return await respond(request, "groups.html", GroupsPage(run_id, head.source_run_id, only, counts, shown, more))


@dataclass(slots=True, frozen=True)
class MemberColumn:
    """One member. `turns`: its first turns. `difference`: the place where it leaves the first member's conversation."""

    rollout: RolloutLine
    use: PlannedUse | None
    turns: list[TurnView]
    difference: FirstDifference | None


@dataclass(slots=True, frozen=True)
class GroupPage:
    """`rewards`: those that count, so not of members that were replaced or ended late. `has_signal`: whether they
    differ; None if this is not decided or has no meaning. `stages`: of the open members, by id. `others`: the members
    without a column. `requests`: what people asked of the group."""

    run_id: str
    group: GroupLine
    rewards: list[float]
    has_signal: bool | None
    members: list[MemberColumn]
    stages: dict[int, str]
    others: list[RolloutLine]
    requests: list[SteeringLine]


@page_route(group_pages, "/groups/{group_id}")
async def show_group(request: Request, group_id: int) -> Response:
    async with request.app.state.store.read() as connection:
        line = found(await read_group_line(connection, group_id), f"group {group_id}")
        rewards = (await read_group_rewards(connection, line.run_id, group_id)).rewards
        rollouts = await list_members(connection, group_id)
        rollouts.sort(key=lambda one: one.replaced_by is not None)
        uses = await planned_uses(connection, line.run_id, line.step) if line.step is not None else {}
        columns: list[MemberColumn] = []
        for one in rollouts[:_MAX_COLUMNS]:
            contents = await read_turn_contents(connection, one.id, _MAX_TURNS)
            turns = read_conversation(contents)
            difference = first_difference(columns[0].turns, turns) if columns else None
            columns.append(MemberColumn(one, uses.get(one.id), turns, difference))
        requests = await list_requests(connection, line.run_id, group_id)
        stages = await stages_of(connection, [one.id for one in rollouts if one.outcome is None])
    page = GroupPage(
        line.run_id, line, rewards, _signal_of(line, rewards), columns, stages, rollouts[_MAX_COLUMNS:], requests
    )
    return await respond(request, "group.html", page)


def _signal_of(group: GroupLine, rewards: list[float]) -> bool | None:
    """Return whether a step can learn from the group; None while it is open, because members may end or be replaced,
    for a group of an evaluation, and for fewer than two rewards."""
    if group.state == GroupState.OPEN or group.purpose != Purpose.TRAIN or len(rewards) < 2:
        return None
    return max(rewards) > min(rewards)
