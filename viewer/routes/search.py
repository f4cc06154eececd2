"""Search: a run, step, group or rollout by name, tasks by labels, or a text in conversations of a run or of all."""

from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from ratchet.errors import ConfigError
from reads.runs import list_run_summaries, read_run_head
from reads.tasks import FoundTask, find_tasks
from reads.text_search import TextHit, TextSearch, count_rollouts_without_words, search_run
from store.names import Kind, find_named
from viewer.rendering import respond, wants_json
from viewer.routes.registration import found, next_link, page_route

search_pages = APIRouter()
_MAX_HITS = 40
_SECONDS = 1.5
_MAX_RUNS = 100
_MAX_TASKS = 20


@dataclass(slots=True, frozen=True)
class SearchPage:
    """`run_id`: None for all runs. `tasks`: those whose labels contain the words, at most 20. `num_turns`: how many
    turns were read for this page. `num_unindexed`: how many rollouts have no words in the index, so that their turns
    are read; at most one more than `MAX_COUNTED`. `next_page`: continues behind the last hit; None if everything is
    searched."""

    words: str
    run_id: str | None
    run_ids: list[str]
    tasks: list[FoundTask]
    hits: list[TextHit]
    num_turns: int
    num_unindexed: int
    next_page: str | None


@page_route(search_pages, "/search")
async def show_search(request: Request, q: str = "", run: str = "", before: int | None = None) -> Response:
    words = q.strip()
    async with request.app.state.store.read() as connection:
        if words and not wants_json(request):
            with suppress(ConfigError):  # words that begin as a name does
                named = await find_named(connection, words)
                if named is not None and named.kind is not Kind.TASK:  # a label may be a part of others
                    return RedirectResponse(quote(named.page), 303)
        run_ids = [one.run_id for one in await list_run_summaries(connection, _MAX_RUNS)]
        run_id = run or None
        if run_id is not None:
            found(await read_run_head(connection, run_id), f"run {run_id}")
        tasks: list[FoundTask] = []
        result, num_unindexed = TextSearch([], 0, None), 0
        if words:
            tasks = await find_tasks(connection, run_id, words, _MAX_TASKS)
            result = await search_run(connection, run_id, words, before, _MAX_HITS, _SECONDS)
            num_unindexed = await count_rollouts_without_words(connection, run_id)
    more = None if result.next_before is None else next_link(request, before=result.next_before)
    page = SearchPage(words, run_id, run_ids, tasks, result.hits, result.num_turns, num_unindexed, more)
    return await respond(request, "search.html", page)
