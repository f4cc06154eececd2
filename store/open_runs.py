"""The runs that are open: which there are, which may run beside them, and a run that goes on.

An engine set serves one run, or as many runs with `training.lora` as its engines have LoRA slots
(`engine.lora_runs`), if all have one base. A run takes a slot of its set when it is created and when it is resumed;
both are checked in their transaction, under a lock of the set (`require_slot`), and its end gives the slot back.

| the set's runs        | event                                    | they become                                      |
|-----------------------|------------------------------------------|--------------------------------------------------|
| none is open          | a run is created or resumed              | that run is open                                 |
| some, a slot is free  | a run that fits to them is created or    | it is open, too, in its former slot if that is   |
|                       | resumed                                  | free, else in the free slot of lowest number     |
| some, any other case  | another is to be created or resumed      | as they are: it is refused by the name of one    |
| some are open         | one is done, stopped, failed, cancelled  | its slot is free                                 |

Runs of rollouts by hand and runs that train on stored groups take no slot. Every pause is one of the two statements at
the end; `resume_run` is their opposite.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.lora_slots import FIRST_SLOT, served_rank
from ratchet.stored_config import read_stored_config
from ratchet.types import OPEN_STATES, JsonObject, RunState, Wish
from store.runs import ADHOC
from store.schema import PolicyVersionTable, RunTable

_ONE_OPEN_RUN = 0x52415443  # key of an advisory lock; any number that no other lock uses
_OPEN = RunTable.state.in_(OPEN_STATES)
_TAKES_A_SET = (RunTable.config_name != ADHOC) & RunTable.source_run_id.is_(None)


async def unfinished_runs(connection: AsyncConnection, running: bool = False) -> list[str]:
    """Return the training runs whose workflow must run. `running`: without those that are paused."""
    wanted = RunTable.state == RunState.RUNNING if running else _OPEN
    return list((await connection.execute(select(RunTable.run_id).where(wanted, _TAKES_A_SET))).scalars())


class OpenSet(NamedTuple):
    """An engine set and one of its open runs. `config`: of the run, as it is stored."""

    engine_set: str
    run_id: str
    state: str
    config: JsonObject

    @property
    def needs_engines(self) -> bool:
        """True if the set's engines, and not an endpoint, answer the run."""
        return self.config.get("endpoint") is None


async def open_sets(connection: AsyncConnection) -> list[OpenSet]:
    """Return the sets with an open run, once per run, the one whose run was created first at the front."""
    columns = (RunTable.engine_set, RunTable.run_id, RunTable.state, RunTable.config)
    statement = select(*columns).where(_OPEN, _TAKES_A_SET)
    return [OpenSet(*row) for row in await connection.execute(statement.order_by(RunTable.created_at))]


async def require_slot(
    connection: AsyncConnection, run_id: str, config: RunConfig, base: Sequence[JsonObject] | None = None
) -> int:
    """Return the LoRA slot of a training run in its engine set, and let no other run take one until the transaction
    ends.

    `base`: the files of the run's version 0, None if they are not known yet. Raises ConfigError if another run of the
    set is open and the engines cannot serve both: its rollouts would be sampled by the weights of the other one.
    """
    name = config.engine_set
    await connection.execute(select(func.pg_advisory_xact_lock(_ONE_OPEN_RUN, func.hashtext(name))))
    columns = (RunTable.run_id, RunTable.lora_slot, RunTable.config)
    of_set = select(*columns).where(_OPEN, _TAKES_A_SET, RunTable.engine_set == name, RunTable.run_id != run_id)
    others = (await connection.execute(of_set.order_by(RunTable.created_at))).all()
    for other in others:
        reason = _reason_against(config, other.config)
        if (
            reason is None
            and base is not None
            and _digests(base) != _digests(await _first_files(connection, other.run_id))
        ):
            reason = "its version 0 has other weights than this run's, and adapters of one engine have one base"
        if reason is not None:
            raise _still_open(other.run_id, name, reason)
    free = set(range(FIRST_SLOT, FIRST_SLOT + config.engine.lora_runs)) - {other.lora_slot for other in others}
    if not free:
        reason = f"all LoRA slots of its engines have a run (engine.lora_runs: {config.engine.lora_runs})"
        raise _still_open(others[0].run_id, name, reason)
    former = await connection.scalar(select(RunTable.lora_slot).where(RunTable.run_id == run_id))
    return former if former in free else min(free)


def _still_open(run_id: str, engine_set: str, reason: str) -> ConfigError:
    return ConfigError(
        f"run {run_id} of engine set {engine_set!r} is still open, and {reason}: wait for its end, end it "
        f"(`ratchet stop {run_id}`), or give this run's config another `engine_set`, which starts engines of its own"
    )


def _reason_against(config: RunConfig, stored: JsonObject) -> str | None:
    """Return why a run cannot share engines with the open run of the config `stored`; None if it can."""
    if config.training.lora is None or config.endpoint is not None:
        return "the engines of a set serve one policy at a time, unless all its runs have `training.lora`"
    other = read_stored_config(stored)
    if other.training.lora is None or other.endpoint is not None:
        return "it has no `training.lora`, so that its engines serve no other run"
    theirs, ours = _shared_values(other), _shared_values(config)
    for key, value in ours.items():
        if theirs[key] != value:
            return f"{key} is {theirs[key]} there and {value} here, which runs that share engines must agree on"
    return None


def _shared_values(config: RunConfig) -> JsonObject:
    """Return config key → value for all that the engines of the config's set are started with."""
    values = {f"engine.{key}": value for key, value in config.engine.model_dump(mode="json").items()}
    values |= {"model": config.model, "sampling.max_context_tokens": config.sampling.max_context_tokens}
    values["training.router_replay"] = config.training.router_replay
    rank = "none" if config.training.lora is None else served_rank(config.training.lora.rank)
    return values | {"the highest rank that engines serve for training.lora.rank": rank}


def _digests(files: Sequence[JsonObject]) -> set[str]:
    return {file["sha256"] for file in files if file["name"].endswith(".safetensors")}


async def _first_files(connection: AsyncConnection, run_id: str) -> list[JsonObject]:
    of_run = select(PolicyVersionTable.files).where(PolicyVersionTable.run_id == run_id, PolicyVersionTable.step == 0)
    return await connection.scalar(of_run.order_by(PolicyVersionTable.epoch.desc()).limit(1)) or []


async def open_slots(connection: AsyncConnection, engine_set: str) -> dict[int, str]:
    """Return slot → the open run that has it, in the engines of a set."""
    of_set = select(RunTable.lora_slot, RunTable.run_id).where(_OPEN, _TAKES_A_SET, RunTable.engine_set == engine_set)
    return {row.lora_slot: row.run_id for row in await connection.execute(of_set)}


async def has_slot(connection: AsyncConnection, run_id: str, slot: int) -> bool:
    """Return whether the run is open and this slot of the engines of its set is its own.

    A sync that was late would load the weights of an ended run, and their base in the place of the other runs'.
    """
    own = select(RunTable.engine_set, RunTable.lora_slot).where(RunTable.run_id == run_id, _OPEN)
    row = (await connection.execute(own)).one_or_none()
    if row is None:
        return False
    same = (RunTable.engine_set == row.engine_set) & (RunTable.lora_slot == slot) & (RunTable.run_id != run_id)
    other = select(RunTable.run_id).where(_OPEN, _TAKES_A_SET, same).limit(1)
    return row.lora_slot == slot and (await connection.execute(other)).first() is None


async def newest_run(connection: AsyncConnection) -> str | None:
    """Return the open run, else the newest, else that by hand, or None. Raises ConfigError if several are open."""
    of_sets = select(RunTable.run_id, RunTable.engine_set).where(_OPEN, _TAKES_A_SET)
    several = (await connection.execute(of_sets.order_by(RunTable.created_at, RunTable.run_id))).all()
    if len(several) > 1:
        names = ", ".join(f"{row.run_id} (engine set {row.engine_set})" for row in several)
        raise ConfigError(f"{len(several)} runs are open: {names}; name one of them")
    is_training = RunTable.config_name != ADHOC
    statement = select(RunTable.run_id).order_by(is_training.desc(), _OPEN.desc(), RunTable.created_at.desc())
    return (await connection.execute(statement.limit(1))).scalar_one_or_none()


async def resume_run(connection: AsyncConnection, run_id: str, allow_done: bool = False) -> str | None:
    """Let a paused, stopped, failed or cancelled run go on and return why it had stopped; None if it was running.

    It goes on from its newest checkpoint. Earlier groups without signal no longer count towards the next pause. Raises
    ConfigError if the run does not exist, is done (unless `allow_done`, for a run that gets more steps) or pruned, or
    if the engines of its set cannot serve it beside another open run.
    """
    of_state = (RunTable.state, RunTable.state_reason, RunTable.pruned_at)
    columns = (*of_state, RunTable.config_name, RunTable.source_run_id, RunTable.config, RunTable.lora_slot)
    statement = select(*columns).where(RunTable.run_id == run_id).with_for_update()
    row = (await connection.execute(statement)).one_or_none()
    if row is None or row.config_name == ADHOC:
        raise ConfigError(f"there is no training run {run_id!r}; `ratchet show runs` lists those that there are")
    if row.state == RunState.DONE and not allow_done:
        raise ConfigError(
            f"run {run_id} is done; `ratchet set {run_id} --add-steps STEPS` adds steps, or start another run from its "
            f"last weights with `--set init_from={run_id}@STEP`"
        )
    if row.state == RunState.RUNNING:
        return None
    if row.pruned_at is not None:
        raise ConfigError(f"run {run_id} was pruned on {row.pruned_at:%Y-%m-%d} and cannot be resumed; start a new run")
    slot = row.lora_slot
    # A paused run is open and has its slot, and what paused it may be a config that cannot be read.
    if row.source_run_id is None and row.state != RunState.PAUSED:
        files = await _first_files(connection, run_id)
        slot = await require_slot(connection, run_id, read_stored_config(row.config), files)
    going = update(RunTable).where(RunTable.run_id == run_id)
    await connection.execute(
        going.values(
            state=RunState.RUNNING,
            state_reason="",
            wish=Wish.NONE,
            stop_at=None,
            ended_at=None,
            restarts=0,
            lora_slot=slot,
            patient_from=RunTable.next_group_no,
        )
    )
    return str(row.state_reason) or f"it was {row.state}"


async def pause_run(connection: AsyncConnection, run_id: str, reason: str, epoch: int | None = None) -> None:
    """Move the run from `running` to `paused` with the reason, until a person resumes it. Its batches stay as they are.

    `epoch` fences the write of a learner: nothing happens if another learner has taken over the run. None is for the
    planner, which holds no lease. Nothing happens if the run is not running.
    """
    statement = update(RunTable).where(RunTable.run_id == run_id, RunTable.state == RunState.RUNNING)
    if epoch is not None:
        statement = statement.where(RunTable.epoch == epoch)
    await connection.execute(statement.values(state=RunState.PAUSED, state_reason=reason))


async def pause_all_runs(
    connection: AsyncConnection, reason: str, only_with_rollouts: bool, engine_set: str | None = None
) -> None:
    """Pause running training runs: of `engine_set`, and not on stored rollouts if `only_with_rollouts`."""
    statement = update(RunTable).where(RunTable.state == RunState.RUNNING, RunTable.config_name != ADHOC)
    if only_with_rollouts:
        statement = statement.where(RunTable.source_run_id.is_(None))
    if engine_set is not None:
        statement = statement.where(RunTable.engine_set == engine_set)
    await connection.execute(statement.values(state=RunState.PAUSED, state_reason=reason))
