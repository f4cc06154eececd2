"""The list of rollouts with its filters, and the page of one rollout."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from reads import rollouts
from reads.conversation import TurnView, read_conversation
from reads.reward_explanation import WhySentence, explain_reward
from reads.rollout_list import SORTED_OF, SORTS, RolloutFilter, RolloutLine, list_sorted_rollouts
from reads.turns import read_turn_contents, turns_in_chains
from store import open_rollouts
from viewer.models.timeline import Timeline, TurnGraph, build_graph, build_timeline
from viewer.renderers.registry import OwnPart, own_parts
from viewer.rendering import respond
from viewer.routes.registration import found, next_link, page_route, read_number

rollout_pages = APIRouter()
_PAGE_ROLLOUTS = 50
_PAGE_TURNS = 25
_MAX_TURN_LINES = 500


@dataclass(slots=True, frozen=True)
class RolloutsPage:
    """`stages`: of the open rollouts, by id. `sort`: one of `SORTS`; but for newest among the `sorted_of` newest."""

    wanted: RolloutFilter
    task: str
    sort: str
    sorted_of: int
    rollouts: list[RolloutLine]
    stages: dict[int, str]
    next_page: str | None


@dataclass(slots=True, frozen=True)
class RolloutPage:
    """`stage`: None once it has ended. `versions`: the policy versions that sampled its turns, in order of their first
    use. `turns`: the page of the conversation that begins behind the turn `after`. `turn_lines`: the first turns, of
    `num_turns`, which the time line and the graph show. `previous` and `next`: the rollouts of the same run beside this
    one. `own_parts`: of the task's renderer."""

    facts: rollouts.RolloutFacts
    stage: str | None
    versions: list[str]
    trace_id: str
    why: list[WhySentence]
    patch_text: str
    grade_log: str
    turns_in_chains: list[int]
    timeline: Timeline
    graph: TurnGraph
    turn_lines: list[rollouts.TurnLine]
    num_turns: int
    turns: list[TurnView]
    first_turn: int
    next_page: str | None
    previous: int | None
    next: int | None
    own_parts: list[OwnPart] = field(default_factory=list)


@page_route(rollout_pages, "/rollouts")
async def show_rollouts(
    request: Request,
    run: str | None = None,
    purpose: str | None = None,
    outcome: str | None = None,
    agent_exit: str | None = None,
    reward_from: str = "",
    reward_to: str = "",
    task: str = "",
    reason: str | None = None,
    step: str = "",
    evaluation: str | None = None,
    flagged: bool = False,
    stage: str | None = None,
    sort: str = SORTS[0],
    before: int | None = None,
) -> Response:
    """Empty values, which forms send for fields that are not filled in, are no conditions.

    `task`: a task's id, or a part of its label."""
    if sort not in SORTS:
        raise HTTPException(422, f"sort is one of {', '.join(SORTS)}, not {sort[:40]!r}")
    if stage and stage not in open_rollouts.STAGES:
        raise HTTPException(422, f"stage is one of {', '.join(open_rollouts.STAGES)}, not {stage[:40]!r}")
    if stage and not run:
        raise HTTPException(422, "stage needs a run: add its id")
    is_id = task.isascii() and task.isdigit()
    wanted = RolloutFilter(
        run_id=run or None,
        purpose=purpose or None,
        outcome=outcome or None,
        agent_exit=agent_exit or None,
        reward_from=read_number(float, "reward_from", reward_from),
        reward_to=read_number(float, "reward_to", reward_to),
        task_id=read_number(int, "task", task) if is_id else None,
        task=None if is_id else task.strip() or None,
        reason=reason or None,
        policy_step=read_number(int, "step", step),
        evaluation=evaluation or None,
        flagged=flagged,
        stage=stage or None,
        has_started=not (outcome or stage),
    )
    async with request.app.state.store.read() as connection:
        lines = await list_sorted_rollouts(connection, wanted, sort, _PAGE_ROLLOUTS, before)
        stages = await open_rollouts.stages_of(connection, [one.id for one in lines if one.outcome is None])
    more = next_link(request, before=lines[-1].id) if len(lines) == _PAGE_ROLLOUTS else None
    page = RolloutsPage(wanted, task.strip(), sort, SORTED_OF, lines, stages, more)
    return await respond(request, "rollouts.html", page)


@page_route(rollout_pages, "/rollouts/{rollout_id}")
async def show_rollout(request: Request, rollout_id: int, after: int = 0) -> Response:
    """`after`: id of the turn behind which the conversation begins."""
    is_export = request.app.state.settings.is_export
    async with request.app.state.store.read() as connection:
        page = await read_rollout_page(connection, request, rollout_id, after, 10_000 if is_export else _PAGE_TURNS)
    facts = page.facts
    parts = await own_parts(request.app.state.store, facts.rollout, page.turns, page.patch_text, facts.grade)
    page = replace(page, own_parts=parts)
    return await respond(request, "rollout.html", page)


@rollout_pages.get("/rollouts/{rollout_id}/turns/{turn_id}")
async def show_turn(request: Request, rollout_id: int, turn_id: int) -> Response:
    """A deep link to a turn: the page of the conversation that begins with the turn before it."""
    async with request.app.state.store.read() as connection:
        ids = await rollouts.list_turn_ids_through(connection, rollout_id, turn_id, _PAGE_TURNS + 1)
    found(turn_id if turn_id in ids else None, f"turn {turn_id} of rollout {rollout_id}")
    after = ids[2] if len(ids) > _PAGE_TURNS else 0
    where = f"?after={after}" if after else ""
    return RedirectResponse(f"/rollouts/{rollout_id}{where}#turn-{turn_id}", 303)


async def read_rollout_page(
    connection: AsyncConnection, request: Request, rollout_id: int, after: int, page_turns: int
) -> RolloutPage:
    head = found(await rollouts.read_rollout_head(connection, rollout_id), f"rollout {rollout_id}")
    facts = await rollouts.read_rollout_facts(connection, head)
    lines = await rollouts.list_turn_lines(connection, rollout_id, _MAX_TURN_LINES)
    contents = await read_turn_contents(connection, rollout_id, page_turns, after)
    counts = await rollouts.count_turns(connection, rollout_id, after)
    first = counts.num_before + 1
    last = contents[-1].id if contents else after
    neighbours = await rollouts.neighbours_of(connection, head.run_id, rollout_id)
    spans = (span for turn in lines for span in turn.version_spans or ())
    return RolloutPage(
        facts=facts,
        stage=(await open_rollouts.stages_of(connection, [rollout_id])).get(rollout_id),
        versions=list(dict.fromkeys(str(span.get("version")) for span in spans)),
        trace_id=await rollouts.read_trace_id(connection, rollout_id),
        why=explain_reward(facts),
        patch_text=await rollouts.read_patch_text(connection, facts.patch.id) if facts.patch else "",
        grade_log=await rollouts.read_grade_log(connection, facts.grade.id) if facts.grade else "",
        turns_in_chains=await turns_in_chains(connection, rollout_id),
        timeline=build_timeline(head, facts.boxes, lines, datetime.now(UTC)),
        graph=build_graph(lines),
        turn_lines=lines,
        num_turns=counts.num_turns,
        turns=read_conversation(contents, first),
        first_turn=first,
        next_page=next_link(request, after=last) if contents and counts.newest > last else None,
        previous=neighbours.previous,
        next=neighbours.next,
    )
