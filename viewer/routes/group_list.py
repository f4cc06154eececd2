"""The page of a run's groups by what has become of them."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ratchet.errors import ConfigError
from reads.groups import GroupCount, GroupFilter, ListedGroup, count_groups_by_progress, list_groups, read_group_filter
from reads.runs import read_run_head
from viewer.rendering import respond
from viewer.routes.registration import found, next_link, page_route

group_list_pages = APIRouter()
_PAGE_GROUPS = 50


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


@page_route(group_list_pages, "/runs/{run_id}/groups")
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
