"""One rollout: its row, attempts, boxes, patches, grades, chains, its group's rewards, and the times of its turns.

Token arrays and messages are read by `turns.py`, page by page.
"""

from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.tracing import RolloutTrace
from ratchet.types import REWARDED_OUTCOMES, GroupState, JsonObject
from reads.conversation import explain_empty_patch
from reads.rollout_list import RolloutFields
from reads.runs import shown_endpoint
from reads.step_rows import discarded_plans
from reads.turns import TurnFields
from store.arrays import unpack_text
from store.columns import columns_of
from store.forks import Fork, forks_of
from store.grades import GradeFields
from store.names import Kind, require_named
from store.schema import (
    AttemptTable,
    BatchItemTable,
    BatchTable,
    ChainTable,
    GradeTable,
    InstallationTable,
    PatchTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    SandboxTable,
    SessionTable,
    TaskTable,
    TurnTable,
)

_R = TypeVar("_R")


@dataclass(slots=True, frozen=True)
class RolloutHead(RolloutFields):
    """A rollout's row with its task and run; `RolloutTable` describes the columns. `endpoint`: url and model of what
    answers in place of the policy, None if the policy does. `forked_turn_id`, `forked_from`: the turn before which it
    began and that turn's rollout, None if it is no fork (`store.forks`)."""

    attempt: int
    temperature: float
    policy_version: str | None
    outcome_reason: str
    reward_components: JsonObject | None
    grade_id: int | None
    num_chains: int
    provenance: JsonObject
    model_path: str
    problem: str
    archived_at: datetime | None
    endpoint: JsonObject | None
    forked_turn_id: int | None = None
    forked_from: int | None = None


@dataclass(slots=True, frozen=True)
class AttemptView:
    """An attempt; `AttemptTable` describes the columns. `num_replayed`: its turns that an earlier one has sampled."""

    n: int
    state: str
    agent_exit: str | None
    used_seconds: float
    harness_version: str | None
    base_commit: str | None
    engine_wait_seconds: float | None
    num_replayed: int
    created_at: datetime


@dataclass(slots=True, frozen=True)
class BoxView:
    """A box of the ledger; `SandboxTable` describes the columns."""

    id: int
    role: str
    attempt: int
    state: str
    provider: str
    provider_id: str | None
    image: str
    release_reason: str
    boot_error: str | None
    created_at: datetime
    live_at: datetime | None
    released_at: datetime | None


@dataclass(slots=True, frozen=True)
class PatchView:
    id: int
    attempt: int
    num_bytes: int
    num_files: int
    reason: str
    created_at: datetime


@dataclass(slots=True, frozen=True)
class GradeView(GradeFields):
    id: int
    control: list[JsonObject] | None
    created_at: datetime


@dataclass(slots=True, frozen=True)
class ChainView:
    id: int
    no: int
    num_tokens: int
    num_trained: int


@dataclass(slots=True, frozen=True)
class TurnLine(TurnFields):
    """A turn without its contents."""

    parent_turn_id: int | None
    dialect: str
    kept_tokens: int
    logprobs_valid: bool
    version_spans: list[JsonObject] | None
    delivered: bool
    engine_wait_seconds: float
    engine_id: int | None
    created_at: datetime
    completed_at: datetime | None


@dataclass(slots=True, frozen=True)
class PlannedUse:
    """A step's use of a rollout; the fields of `training.plan_types.Member` that people read."""

    step: int
    advantage: float
    reward: float
    num_tokens: int
    weight: float


@dataclass(slots=True, frozen=True)
class GroupRewards:
    """The rewards of a rollout's group, when a step consumed it if one has, and what became of the group. `use` is None
    before. `discarded`: how a person has discarded the plan with the group, else empty. `state`: the group's."""

    rewards: list[float]
    num_open: int
    step: int | None
    use: str | None
    discarded: str = ""
    state: str = GroupState.OPEN


async def require_rollout(connection: AsyncConnection, name: str | int) -> RolloutHead:
    """Return the rollout with this name (`store.names`). Raises ConfigError if it does not exist."""
    named = await require_named(connection, str(name), Kind.ROLLOUT)
    head = await read_rollout_head(connection, named.id)
    assert head is not None, "found in the same transaction"
    return head


async def read_rollout_head(connection: AsyncConnection, rollout_id: int) -> RolloutHead | None:
    other: dict[str, Any] = {
        "group_no": RolloutGroupTable.group_no,
        "task": TaskTable.label,
        "model_path": RunTable.model_path,
        "problem": func.coalesce(TaskTable.spec["problem_statement"].astext, TaskTable.spec["prompt"].astext, ""),
        "archived_at": RunTable.archived_at,
        "endpoint": RunTable.config["endpoint"],
        "forked_turn_id": RolloutGroupTable.forked_turn_id,
        "forked_from": TurnTable.rollout_id,
    }
    statement = (
        select(*columns_of(RolloutHead, RolloutTable, **other))
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .join(RunTable, RunTable.run_id == RolloutTable.run_id)
        .outerjoin(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .outerjoin(TurnTable, TurnTable.id == RolloutGroupTable.forked_turn_id)
        .where(RolloutTable.id == rollout_id)
    )
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else replace(RolloutHead(*row), endpoint=shown_endpoint(row.endpoint))


async def read_trace_id(connection: AsyncConnection, rollout_id: int) -> str:
    """Return the id of the rollout's trace, empty before any worker or adapter has run."""
    installation = (await connection.execute(select(InstallationTable.uuid))).scalar_one_or_none()
    return "" if installation is None else RolloutTrace.of(installation, rollout_id).hex


async def list_attempts(connection: AsyncConnection, rollout_id: int) -> list[AttemptView]:
    replayed = (TurnTable.session_id == SessionTable.id) & TurnTable.replayed_at.is_not(None)
    of_session = {
        "engine_wait_seconds": SessionTable.engine_wait_seconds,
        "num_replayed": select(func.count(TurnTable.id)).where(replayed).scalar_subquery(),
    }
    statement = (
        select(*columns_of(AttemptView, AttemptTable, **of_session))
        .outerjoin(
            SessionTable,
            (SessionTable.rollout_id == AttemptTable.rollout_id) & (SessionTable.attempt == AttemptTable.n),
        )
        .where(AttemptTable.rollout_id == rollout_id)
        .order_by(AttemptTable.n)
    )
    return [AttemptView(*row) for row in await connection.execute(statement)]


async def _list_rows(
    connection: AsyncConnection, record: type[_R], table: Any, rollout_id: int, limit: int | None = None
) -> list[_R]:
    """Return the rollout's rows of a table in the order of their ids."""
    statement = select(*columns_of(record, table)).where(table.rollout_id == rollout_id).order_by(table.id)
    return [record(*row) for row in await connection.execute(statement.limit(limit))]


async def list_chains(connection: AsyncConnection, rollout_id: int) -> list[ChainView]:
    return sorted(await _list_rows(connection, ChainView, ChainTable, rollout_id), key=lambda chain: chain.no)


async def list_turn_lines(connection: AsyncConnection, rollout_id: int, limit: int | None = None) -> list[TurnLine]:
    """Return the turns, or the first `limit`, of all attempts in the order in which they were opened."""
    return await _list_rows(connection, TurnLine, TurnTable, rollout_id, limit)


@dataclass(slots=True, frozen=True)
class TurnCounts:
    """The number of turns of a rollout, in all and up to some turn. `newest`: an id, 0 without a turn."""

    num_turns: int
    num_before: int
    newest: int


async def count_turns(connection: AsyncConnection, rollout_id: int, after: int) -> TurnCounts:
    """Count the turns of the rollout, and those up to the turn `after`, inclusive."""
    statement = select(
        func.count(), func.count().filter(TurnTable.id <= after), func.coalesce(func.max(TurnTable.id), 0)
    ).where(TurnTable.rollout_id == rollout_id)
    return TurnCounts(*(await connection.execute(statement)).one())


async def list_turn_ids_through(connection: AsyncConnection, rollout_id: int, turn_id: int, limit: int) -> list[int]:
    """Return the ids of the newest `limit` turns of the rollout up to `turn_id`, inclusive, newest first."""
    statement = select(TurnTable.id).where(TurnTable.rollout_id == rollout_id, TurnTable.id <= turn_id)
    return list((await connection.execute(statement.order_by(TurnTable.id.desc()).limit(limit))).scalars())


async def read_patch_text(connection: AsyncConnection, patch_id: int) -> str:
    found = await connection.execute(select(PatchTable.diff).where(PatchTable.id == patch_id))
    return unpack_text(found.scalar_one())


async def read_grade_log(connection: AsyncConnection, grade_id: int) -> str:
    """Return the grader's log; empty if it is archived."""
    data = (await connection.execute(select(GradeTable.log).where(GradeTable.id == grade_id))).scalar_one()
    return unpack_text(data) if data else ""


async def read_attempt_logs(connection: AsyncConnection, rollout_id: int, n: int) -> tuple[str, str]:
    """Return the workspace's log and the agent's transcript of an attempt; each is empty if there is none."""
    statement = select(AttemptTable.workspace_log, AttemptTable.transcript).where(
        AttemptTable.rollout_id == rollout_id, AttemptTable.n == n
    )
    row = (await connection.execute(statement)).one_or_none()
    workspace, transcript = row or (None, None)
    return (unpack_text(workspace) if workspace else "", unpack_text(transcript) if transcript else "")


async def read_group_rewards(connection: AsyncConnection, run_id: str, group_id: int) -> GroupRewards:
    statement = select(RolloutTable.outcome, RolloutTable.reward).where(
        RolloutTable.group_id == group_id, RolloutTable.replaced_by.is_(None), RolloutTable.late.is_(False)
    )
    rows = (await connection.execute(statement.order_by(RolloutTable.member))).all()
    item = select(BatchItemTable.step, BatchItemTable.use, BatchItemTable.rewards).where(
        BatchItemTable.run_id == run_id, BatchItemTable.group_id == group_id
    )
    consumed = (await connection.execute(item)).one_or_none()
    about = select(RolloutGroupTable.workflow_id, RolloutGroupTable.state).where(RolloutGroupTable.id == group_id)
    group = (await connection.execute(about)).one()
    discarded = await discarded_plans(connection, run_id, group=group.workflow_id) if consumed is None else []
    return GroupRewards(
        consumed.rewards if consumed else [row.reward for row in rows if row.outcome in REWARDED_OUTCOMES],
        sum(row.outcome is None for row in rows),
        consumed.step if consumed else None,
        consumed.use if consumed else None,
        discarded[-1].sentence() if discarded else "",
        group.state,
    )


async def planned_uses(connection: AsyncConnection, run_id: str, step: int) -> dict[int, PlannedUse]:
    statement = select(BatchTable.members).where(BatchTable.run_id == run_id, BatchTable.step == step)
    members = (await connection.execute(statement)).scalar_one_or_none() or []
    return {
        one["rollout_id"]: PlannedUse(step, one["advantage"], one["reward"], one["num_tokens"], float(one["weight"]))
        for one in members
    }


@dataclass(slots=True, frozen=True)
class TrainingRules:
    """The config keys by which a rollout of a trained group is not trained; None if the config lacks the key."""

    negative_weight: float | None
    truncated: str | None
    loss_preset: str | None


@dataclass(slots=True, frozen=True)
class RolloutNeighbours:
    """The rollouts of the same run before and after one, by id; None at the ends."""

    previous: int | None
    next: int | None


async def neighbours_of(connection: AsyncConnection, run_id: str, rollout_id: int) -> RolloutNeighbours:
    same = RolloutTable.run_id == run_id
    before = select(RolloutTable.id).where(same, RolloutTable.id < rollout_id).order_by(RolloutTable.id.desc()).limit(1)
    after = select(RolloutTable.id).where(same, RolloutTable.id > rollout_id).order_by(RolloutTable.id).limit(1)
    both = select(before.scalar_subquery(), after.scalar_subquery())
    return RolloutNeighbours(*(await connection.execute(both)).one())


@dataclass(slots=True, frozen=True)
class RolloutFacts:
    """The facts about a rollout that its page, commands, tools and the explanation of its reward tell.

    `group`: None for a rollout by hand. `use` and `rules`: of the step that trained its group, None without one.
    `why_empty`: the last calls of the attempt whose patch, the newest, is empty; empty if it is not.
    """

    rollout: RolloutHead
    attempts: list[AttemptView]
    boxes: list[BoxView]
    patches: list[PatchView]
    grades: list[GradeView]
    chains: list[ChainView]
    group: GroupRewards | None
    use: PlannedUse | None
    rules: TrainingRules | None
    why_empty: str = ""
    forks: list[Fork] = field(default_factory=list)

    @property
    def patch(self) -> PatchView | None:
        return self.patches[-1] if self.patches else None

    @property
    def grade(self) -> GradeView | None:
        """The grade that decided the reward, else the newest one."""
        newest = self.grades[-1] if self.grades else None
        return next((one for one in self.grades if one.id == self.rollout.grade_id), newest)


async def read_rollout_facts(connection: AsyncConnection, head: RolloutHead) -> RolloutFacts:
    group = use = rules = None
    if head.group_id is not None:
        group = await read_group_rewards(connection, head.run_id, head.group_id)
        if group.step is not None and group.use == "trained":
            use = (await planned_uses(connection, head.run_id, group.step)).get(head.id)
            training, loss = RunTable.config["training"], RunTable.config["loss"]
            columns = (training["negative_weight"].as_float(), training["truncated"].astext, loss["preset"].astext)
            of_run = select(*columns).where(RunTable.run_id == head.run_id)
            rules = TrainingRules(*(await connection.execute(of_run)).one())
    patches = await _list_rows(connection, PatchView, PatchTable, head.id)
    why_empty = ""
    if patches and not patches[-1].num_bytes and not patches[-1].reason:
        why_empty = await explain_empty_patch(connection, head.id, patches[-1].attempt)
    return RolloutFacts(
        head,
        await list_attempts(connection, head.id),
        await _list_rows(connection, BoxView, SandboxTable, head.id),
        patches,
        await _list_rows(connection, GradeView, GradeTable, head.id),
        await list_chains(connection, head.id),
        group,
        use,
        rules,
        why_empty,
        await forks_of(connection, head.id),
    )


async def describe_rollout(connection: AsyncConnection, name: str | int) -> JsonObject:
    """Return everything about one rollout except its messages and token arrays: its facts and turns, with each attempt
    its `transcript`, with each patch its `diff` and with each grade its `log`; None if archived.

    Raises ConfigError if it does not exist.
    """
    head = await require_rollout(connection, name)
    report = asdict(await read_rollout_facts(connection, head))
    report["turns"] = [asdict(one) for one in await list_turn_lines(connection, head.id)]
    for rows, key, table, text in (
        ("attempts", "n", AttemptTable, "transcript"),
        ("patches", "id", PatchTable, "diff"),
        ("grades", "id", GradeTable, "log"),
    ):
        columns = (getattr(table, key), getattr(table, text))
        stored = await connection.execute(select(*columns).where(table.rollout_id == head.id))
        texts = {number: unpack_text(data) if data is not None else None for number, data in stored}
        for row in report[rows]:
            row[text] = texts.get(row[key])
    return report
