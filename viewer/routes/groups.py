"""The page of a group: its rollouts side by side, and where their conversations first differ."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from ratchet.store.views import rollout_list, rollout_views, run_views, turn_views
from ratchet.store.views.rollout_list import RolloutLine
from ratchet.store.views.rollout_views import PlannedUse
from ratchet.store.views.run_views import GroupLine
from viewer.models.conversation import TurnView, read_conversation
from viewer.models.differences import FirstDifference, first_difference
from viewer.rendering import respond
from viewer.routes.registration import found, page_route

group_pages = APIRouter()
_MAX_TURNS = 12
_MAX_MEMBERS = 16


@dataclass(slots=True, frozen=True)
class MemberColumn:
    """One member. `turns`: its first turns. `difference`: the place where it leaves the first member's conversation."""

    rollout: RolloutLine
    use: PlannedUse | None
    turns: list[TurnView]
    difference: FirstDifference | None


@dataclass(slots=True, frozen=True)
class GroupPage:
    """`has_signal`: whether the rewards differ; None while fewer than two members have one."""

    run_id: str
    group: GroupLine
    has_signal: bool | None
    members: list[MemberColumn]


@page_route(group_pages, "/groups/{group_id}")
async def show_group(request: Request, group_id: int) -> Response:
    async with request.app.state.store.read() as connection:
        line = found(await run_views.read_group_line(connection, group_id), f"group {group_id}")
        run_id = found(await run_views.run_of_group(connection, group_id), f"group {group_id}")
        rollouts = (await rollout_list.list_members(connection, group_id))[:_MAX_MEMBERS]
        uses = await rollout_views.planned_uses(connection, run_id, line.step) if line.step is not None else {}
        columns: list[MemberColumn] = []
        for one in rollouts:
            contents = await turn_views.read_turn_contents(connection, one.id, _MAX_TURNS)
            turns = read_conversation(contents)
            difference = first_difference(columns[0].turns, turns) if columns else None
            columns.append(MemberColumn(one, uses.get(one.id), turns, difference))
    rewards = [one.reward for one in rollouts if one.reward is not None and one.replaced_by is None]
    has_signal = None if len(rewards) < 2 else max(rewards) > min(rewards)
    return respond(request, "group.html", GroupPage(run_id, line, has_signal, columns))
