"""Find out what a run waits for: its state, its rollouts by stage, the parts that do not answer, what is retried.

Every source may be away, and the diagnosis says so instead of failing; the parts' health is a file.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.service import RPCError

from ratchet.config_engines import DEFAULT_SET
from ratchet.durations import duration_in_words
from ratchet.errors import ConfigError, MachineError, StoreUnavailableError
from ratchet.run_names import require_run_id
from ratchet.secrets import without_secrets
from ratchet.stored_config import read_stored_config
from ratchet.temporal_client import PendingActivity, pending_activities
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import OPEN_STATES, EngineState, JsonObject, RunState, Wish
from reads.runs import require_run
from reads.vitals import WAITS_FOR, Vital, read_vitals
from scheduling.quarantine import QuarantinedTask, quarantined_tasks
from stack.part_health import read_fresh_health
from stack.parts import Stack
from stack.placement import set_of_part
from stack.serving_plan import read_plan
from stack.startup import connect_stack
from store import box_cap, engines, learners, lock_waits, open_rollouts, open_runs, plans, runs, session_notes
from store.database import Database
from store.engines import EngineRow
from store.open_rollouts import StageCount

UNKNOWN = "unknown"
"""State of a run in a diagnosis for which the store could not be reached."""
_MAX_WORKFLOWS = 30
_STORE_NOTE = "Postgres: "
_TEMPORAL_SECONDS = 8.0
_SILENT_SECONDS = 60.0
_LOCK_SECONDS = 5


@dataclass(slots=True, frozen=True)
class RetriedActivity:
    """An activity that is tried again, in `count` of the workflows that were looked at. If it `is_waiting` for room, it
    has not failed."""

    activity: str
    count: int
    tries: int
    error: str
    is_waiting: bool = False

    def sentence(self) -> str:
        if self.is_waiting:
            return f"{self.activity} waits for room: {self.error}"
        return f"{self.activity} has failed {self.tries - 1} times and is tried again: {self.error}"


@dataclass(slots=True)
class Diagnosis:
    """The findings about a run. `answer`: what it waits for, as one sentence. `parts`: name → why it does not answer.

    `working`: what the stages of the oldest rollouts report of their work, such as the command that runs.

    `boxes`: the adaptive limit of boxes and its cause. `endpoint`: why calls wait for the endpoint of an evaluation.
    `notes`: what could not be examined.
    """

    run_id: str
    state: str = UNKNOWN
    reason: str = ""
    wish: str = Wish.NONE
    step: int = 0
    num_steps: int = 0
    is_by_hand: bool = False
    engine_set: str = DEFAULT_SET
    needs_engines: bool = False
    answer: str = ""
    vitals: list[Vital] = field(default_factory=list)
    stages: list[StageCount] = field(default_factory=list)
    learner: str = ""
    is_learner_starting: bool = False
    can_skip_step: bool = False
    is_step_planned: bool = False
    endpoint: str = ""
    boxes: str = ""
    engines: list[str] = field(default_factory=list)
    quarantined: list[QuarantinedTask] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    retried: list[RetriedActivity] = field(default_factory=list)
    working: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> JsonObject:
        return asdict(self)


async def diagnose(stack: Stack, run_id: str | None) -> Diagnosis:
    """Look at one run, by default the newest that has not ended, else the newest.

    Raises ConfigError if it does not exist, and MachineError if the store does not answer and no run was named. The
    state of a named one is then UNKNOWN.
    """
    found = Diagnosis(require_run_id(run_id) if run_id else "")
    _look_at_parts(found, stack)
    workflows: list[str] = []
    try:
        async with stack.database() as database, _read_in_time(found, database) as connection:
            found.run_id = found.run_id or await open_runs.newest_run(connection) or ""
            if not found.run_id:
                raise ConfigError("there is no run yet; `ratchet train CONFIG` starts one")
            await _look_at_store(connection, found)
            if found.state == RunState.RUNNING and found.needs_engines:
                _look_at_plan(found, stack)
            workflows = await open_rollouts.oldest_open_workflows(connection, found.run_id, _MAX_WORKFLOWS)
    except StoreUnavailableError as error:
        found.notes.append(f"{_STORE_NOTE}{without_secrets(str(error))}")
        if run_id is None:
            raise MachineError(f"{without_secrets(str(error))}; start the stack with `ratchet up`") from None
    if found.state in (UNKNOWN, *OPEN_STATES) and found.run_id:
        await _look_at_workflows(found, stack, [f"run/{found.run_id}", *workflows])
    found.answer = _answer(found)
    found.vitals = [replace(one, value=found.answer) if one.name == WAITS_FOR else one for one in found.vitals]
    return found


def _look_at_plan(found: Diagnosis, stack: Stack) -> None:
    """Say so if no engine of the run's set is to run: `ratchet up` drops those of a run that is stopped."""
    served = read_plan(stack).sets
    if served and found.engine_set not in served:
        found.parts.setdefault(
            "engine",
            f"engine set {found.engine_set} is not served (served: {', '.join(served)}); `ratchet train CONFIG` with "
            "the run's config starts its engines",
        )


@asynccontextmanager
async def _read_in_time(found: Diagnosis, database: Database) -> AsyncIterator[AsyncConnection]:
    """Open a transaction whose statements do not wait for locks that others have held for long."""
    async with database.begin() as connection:
        if (wait := await lock_waits.longest_lock_wait(connection)) is not None:
            found.parts = {"postgres": wait.sentence()} | found.parts  # it stops the others
        await connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'")
        yield connection


def _look_at_parts(found: Diagnosis, stack: Stack) -> None:
    health = read_fresh_health(stack.home)
    if health is None:
        found.notes.append("the stack's parts are not probed: no watcher runs (`ratchet up` starts it)")
        return
    now = time.time()
    found.parts = {name: words for name, part in health.items() if (words := part.summary(now))}


async def _look_at_store(connection: AsyncConnection, found: Diagnosis) -> None:
    row = await runs.the_run(connection, found.run_id)
    config = read_stored_config(row.config)
    training = config.training
    found.reason = row.state_reason
    found.wish = row.wish
    found.step = row.step
    found.is_by_hand = row.is_by_hand
    found.num_steps = 0 if found.is_by_hand else training.steps
    vitals = await read_vitals(connection, await require_run(connection, found.run_id))
    found.state = row.state  # behind the facts, without which nothing is known
    found.vitals = vitals.facts
    found.stages = vitals.waits
    found.quarantined = await quarantined_tasks(connection, found.run_id, training.groups_per_step)
    cap = await box_cap.read_cap(connection, found.run_id) if config.sandbox.adaptive else None
    if cap is not None and cap.limit < config.sandbox.max_boxes:
        found.boxes = cap.sentence(config.sandbox.max_boxes)
    if (waiting := await session_notes.endpoint_errors(connection, found.run_id)) is not None:
        found.endpoint = f"{waiting.num_waiting} rollouts wait for their endpoint: {waiting.reason}"
    planned = await plans.unfinished_step(connection, found.run_id)
    learner = await learners.get_learner(connection, found.run_id)
    found.is_step_planned = planned is not None
    work = f"step {planned} is planned" if planned is not None else "no step is planned"
    if await learners.is_starting(connection, found.run_id):
        loads = f"the model and the checkpoint of step {row.checkpoint_step}" if row.checkpoint_step else "the model"
        failures = learner.failures_since(row.checkpoint_step) if learner is not None else 0
        begins = f"has failed {failures} times and starts anew" if failures else "starts" + (" anew" if learner else "")
        found.learner = (
            f"it {begins} and loads {loads}, a minute or more; `ratchet admin logs learner` says more; {work}"
        )
        found.is_learner_starting = True
    elif learner is not None and learner.phase == learners.TRAINED_ALL:
        found.learner = f"it has ended after step {learner.step}; {work}"
    elif learner is not None:
        found.learner = (
            f"{learner.phase} {learner.step}, heartbeat {duration_in_words(learner.silent_seconds)} ago; {work}"
        )
        if learner.silent_seconds > _SILENT_SECONDS and found.state == RunState.RUNNING:
            found.parts.setdefault("learner", f"silent for {duration_in_words(learner.silent_seconds)}")
            found.can_skip_step = planned is not None and row.source_run_id is None
        elif planned is not None and learner.phase == learners.WAITING and learner.step > planned:
            found.parts.setdefault(
                "learner",
                f"it waits for step {learner.step}, but step {planned} is planned: rows of a step that it has trained "
                "are gone; `ratchet down` and `ratchet up` make it begin again at its checkpoint",
            )
    found.engine_set = row.engine_set
    found.needs_engines = row.source_run_id is None and config.endpoint is None
    _look_at_engines(found, await engines.list_engines(connection, row.engine_set))


def _look_at_engines(found: Diagnosis, of_set: Sequence[EngineRow]) -> None:
    """Take in the engines of the run's set; the run does not wait for those of other sets."""
    found.parts = {name: words for name, words in found.parts.items() if set_of_part(name) in (None, found.engine_set)}
    for engine in of_set:
        is_silent = engine.silent_seconds >= engines.SILENT_SECONDS
        silent = f", silent for {duration_in_words(engine.silent_seconds)}" if is_silent else ""
        waits = f", waits for newer weights: {engine.fetch_error}" if engine.fetch_error else ""
        found.engines.append(f"engine {engine.id} {engine.state}, weights {engine.version or 'none'}{silent}{waits}")
        if engine.state not in (EngineState.READY, EngineState.SYNCING) or silent or waits:
            found.parts.setdefault("engine", found.engines[-1])


async def _look_at_workflows(found: Diagnosis, stack: Stack, workflow_ids: list[str]) -> None:
    try:
        async with asyncio.timeout(_TEMPORAL_SECONDS):
            client = await connect_stack(stack, load_temporal_settings())
            pending = await asyncio.gather(*(pending_activities(client, name) for name in workflow_ids))
    except (MachineError, RPCError, TimeoutError) as error:
        found.notes.append(f"Temporal: {' '.join(str(error).split()) or 'it is slow to answer'}")
        return
    if pending[0] is None and found.state == RunState.RUNNING and not found.is_by_hand:
        found.notes.append(
            f"run/{found.run_id} has no workflow; the sweep starts it within two minutes, else `ratchet up` does"
        )
    found.working = [
        f"{name}, {one.name}: {one.heartbeat}"
        for name, listed in zip(workflow_ids[1:], pending[1:], strict=True)
        for one in listed or []
        if one.heartbeat
    ]
    found.retried = retried_activities([one for listed in pending for one in listed or []])


def retried_activities(pending: Sequence[PendingActivity]) -> list[RetriedActivity]:
    """Return what is tried again, one entry per activity and error: failures first, the most frequent first."""
    counts: Counter[tuple[str, str, bool]] = Counter()
    tries: dict[tuple[str, str, bool], int] = {}
    for activity in pending:
        if activity.attempt > 1 and activity.error:
            key = (activity.name, activity.error, activity.is_waiting)
            counts[key] += 1
            tries[key] = max(tries.get(key, 0), activity.attempt)
    ordered = sorted(counts.items(), key=lambda one: (one[0][2], -one[1]))
    return [RetriedActivity(key[0], count, tries[key], *key[1:]) for key, count in ordered]


async def describe_work(stack: Stack, workflow_id: str) -> list[str]:
    """Return a sentence for each activity that a workflow waits for: its try, what it says, its newest error.

    If Temporal does not answer, the only sentence says so.
    """
    try:
        async with asyncio.timeout(_TEMPORAL_SECONDS):
            client = await connect_stack(stack, load_temporal_settings(), wait_seconds=0)
            pending = await pending_activities(client, workflow_id) or []
    except (MachineError, RPCError, TimeoutError) as error:
        return [
            f"not known, because Temporal does not answer: {' '.join(str(error).split()) or 'it is slow to answer'}"
        ]
    found = []
    for one in pending:
        words = [f"{one.name}, try {one.attempt}", one.heartbeat]
        if one.error:
            words.append(f"the try before failed: {one.error}")
        found.append(": ".join(word for word in words if word))
    return found


def _same_batch(found: Diagnosis) -> str:
    """Say what helps if one batch makes every learner hang: such a learner reports no failure, so no pause follows."""
    if not found.can_skip_step:
        return ""
    return (
        f"; if each new learner stops at this batch, `ratchet pause {found.run_id}` and `ratchet resume {found.run_id} "
        "--skip-step -m REASON` discard it"
    )


def _answer(found: Diagnosis) -> str:
    """Return the first cause that explains the wait: the run's own state, a part, a retried activity, the slowest."""
    if found.state == UNKNOWN:
        note = next(note for note in found.notes if note.startswith(_STORE_NOTE)).removeprefix(_STORE_NOTE)
        reason = f"postgres {found.parts['postgres']}" if "postgres" in found.parts else note
        return f"the store cannot be reached: {reason}; `ratchet up` starts a stack that is stopped"
    by_store = next((one.value for one in found.vitals if one.name == WAITS_FOR), "")
    if found.state == RunState.RUNNING and found.parts:
        name, words = next(iter(found.parts.items()))
        return f"{name}: {words}" + (_same_batch(found) if name == "learner" else "")
    if found.state != RunState.RUNNING or found.wish != Wish.NONE or found.reason:
        return by_store
    if found.endpoint:
        return found.endpoint
    if found.retried:
        return found.retried[0].sentence()
    if found.is_learner_starting and (found.is_step_planned or not found.stages):
        return f"the learner: {found.learner}"
    if found.notes:
        return found.notes[0]
    return by_store
