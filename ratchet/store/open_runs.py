"""The runs that are open: which there are, which may run beside them, and a run that goes on.

An engine set serves one run at a time. A run takes its set when it is created and when it is resumed; both are checked
in their transaction, under a lock of the set (`require_no_other_run`), and its end gives the set back.

| the set's runs | event                                    | they become                                       |
|----------------|------------------------------------------|---------------------------------------------------|
| none is open   | a run is created or resumed              | that run is open                                  |
| one is open    | another is to be created or resumed      | as they are: the other one is refused by its name |
| one is open    | it is done, stopped, failed or cancelled | none is open                                      |

Runs of rollouts by hand and runs that train on stored groups take no set.
"""

from typing import NamedTuple

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import ConfigError
from ratchet.store.runs import ADHOC
from ratchet.store.schema import RunTable
from ratchet.types import JsonObject, RunState, Wish

_ONE_OPEN_RUN = 0x52415443  # key of an advisory lock; any number that no other lock uses
_OPEN = RunTable.state.in_((RunState.RUNNING, RunState.PAUSED))
_TAKES_A_SET = (RunTable.config_name != ADHOC) & RunTable.source_run_id.is_(None)


async def unfinished_runs(connection: AsyncConnection, running: bool = False) -> list[str]:
    """Return the training runs whose workflow must run. `running`: without those that are paused."""
    wanted = RunTable.state == RunState.RUNNING if running else _OPEN
    return list((await connection.execute(select(RunTable.run_id).where(wanted, _TAKES_A_SET))).scalars())


class OpenSet(NamedTuple):
    """An engine set with an open run. `config`: of the run, as it is stored."""

    engine_set: str
    run_id: str
    state: str
    config: JsonObject

    @property
    def needs_engines(self) -> bool:
        """Whether the set's engines answer the run, and not an endpoint."""
        return self.config.get("endpoint") is None


async def open_sets(connection: AsyncConnection) -> list[OpenSet]:
    """Return the sets with an open run, the one whose run was created first at the front."""
    # Of the config: `ratchet up` asks before the migration that adds the column.
    engine_set = func.coalesce(RunTable.config["engine_set"].astext, DEFAULT_SET)
    statement = select(engine_set, RunTable.run_id, RunTable.state, RunTable.config).where(_OPEN, _TAKES_A_SET)
    return [OpenSet(*row) for row in await connection.execute(statement.order_by(RunTable.created_at))]


async def require_no_other_run(connection: AsyncConnection, run_id: str, engine_set: str) -> None:
    """Prevent other training runs of this engine set from starting until the transaction ends. Raises ConfigError if
    one is open.

    The engines of a set serve one policy; rollouts of two runs would be sampled by each other's weights.
    """
    await connection.execute(select(func.pg_advisory_xact_lock(_ONE_OPEN_RUN, func.hashtext(engine_set))))
    of_set = select(RunTable.run_id).where(_OPEN, _TAKES_A_SET, RunTable.engine_set == engine_set)
    for other in (await connection.execute(of_set.order_by(RunTable.created_at))).scalars():
        if other != run_id:
            raise ConfigError(
                f"run {other} of engine set {engine_set!r} is still open, and the engines of a set serve one policy at "
                f"a time: wait for its end, end it (`ratchet stop {other}`), or give this run's config another "
                "`engine_set`, which starts engines of its own"
            )


async def newest_run(connection: AsyncConnection) -> str | None:
    """Return the open run, or else the newest, or else that of rollouts by hand, which never ends; or None.

    Raises ConfigError, with their names, if several training runs are open.
    """
    of_sets = select(RunTable.run_id, RunTable.engine_set).where(_OPEN, _TAKES_A_SET).order_by(RunTable.created_at)
    several = (await connection.execute(of_sets)).all()
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
    if another run of its engine set is open.
    """
    of_state = (RunTable.state, RunTable.state_reason, RunTable.pruned_at)
    columns = (*of_state, RunTable.config_name, RunTable.source_run_id, RunTable.engine_set)
    statement = select(*columns).where(RunTable.run_id == run_id).with_for_update()
    row = (await connection.execute(statement)).one_or_none()
    if row is None or row.config_name == ADHOC:
        raise ConfigError(f"there is no training run {run_id!r}; `ratchet runs` lists those that there are")
    if row.state == RunState.DONE and not allow_done:
        raise ConfigError(
            f"run {run_id} is done; `ratchet extend {run_id} STEPS` adds steps, or start another run from its last "
            f"weights with `--set init_from={run_id}@STEP`"
        )
    if row.state == RunState.RUNNING:
        return None
    if row.pruned_at is not None:
        raise ConfigError(f"run {run_id} was pruned on {row.pruned_at:%Y-%m-%d} and cannot be resumed; start a new run")
    if row.source_run_id is None:
        await require_no_other_run(connection, run_id, row.engine_set)
    going = update(RunTable).where(RunTable.run_id == run_id)
    await connection.execute(
        going.values(
            state=RunState.RUNNING,
            state_reason="",
            wish=Wish.NONE,
            stop_at=None,
            ended_at=None,
            restarts=0,
            patient_from=RunTable.next_group_no,
        )
    )
    return str(row.state_reason) or f"it was {row.state}"
