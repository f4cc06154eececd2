"""Start the whole stack: model, parts, database, Temporal namespace, workflows of open runs.

The order matters: Postgres → Temporal → search attributes and schedule → the other parts → workflows of open runs.
Which engine sets are served follows from the store (`serving_plan.next_plan`), so if several may be, and Postgres was
down, their engines start once it answers.
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence

from temporalio.client import Client

from activities.dataset_import import offered_rows, offers_of
from activities.run_checks import check_run
from ratchet import temporal_client, worker_versions
from ratchet.config import RunConfig
from ratchet.disk_space import require_space
from ratchet.errors import ConfigError, MachineError, SandboxBusyError, StoreUnavailableError
from ratchet.model_directory import model_of
from ratchet.temporal_settings import TemporalSettings, load_temporal_settings
from reads.reader_role import grant_reader_role
from sandbox_gateway import machine_probe
from sandbox_gateway.boxd.id_modes import id_mode
from sandboxes import docker_settings
from sandboxes.registry import sandbox_provider
from stack import docker_egress, postgres, temporal_namespace
from stack.agent_programs import missing_program
from stack.build_id import build_id
from stack.connections import too_many_connections
from stack.engine_parts import choose_ports, learner_devices, place_parts, replaced_parts, with_gpus
from stack.learner_models import LearnerModels
from stack.parts import WATCHER, Stack
from stack.placement import ENGINE, part_kind
from stack.readiness import LogSizes, answer_of, log_sizes, wait_until_answering
from stack.serving_plan import (
    ServingPlan,
    StackPlan,
    changing_plan,
    next_plan,
    plans_of,
    prepare_model,
    read_plan,
    require_adapter,
    serves_same,
    wants_other,
    write_plan,
)
from stack.supervisor import Supervisor
from stack.temporal_server import settle_temporal_kind
from store import open_runs
from store.database import Database
from store.migration import migrate
from store.open_runs import OpenSet

_ANSWER_SECONDS = 10.0
_REFUSED_SECONDS = 2.0
START_SECONDS = 60.0


def bring_up(
    stack: Stack, config: RunConfig, say: Callable[[str], None], for_run: bool = False, moved: bool | None = None
) -> None:
    """Start the stack and wait until every part answers. Idempotent; it can be interrupted and called again.

    `for_run`: a run of the config is started next, so that its set is kept until the run has its row. `moved`: as for
    `prepare_namespace`. Raises ConfigError, DatasetError and MachineError for mistakes of the user before anything is
    started or written, and MachineError with its first error for a part that does not start.
    """
    settings = load_temporal_settings()
    place_parts(config)
    check_start(config, say, compares_needs=False)  # an open run goes on with the settings that it began with
    require_space(stack.home)
    require_boxes(stack, say)
    asyncio.run(_require_services(stack, settings))
    supervisor = Supervisor(stack)
    with changing_plan(stack, say):
        fresh = not supervisor.is_up()
        opened = asyncio.run(_open_sets(stack, fresh))
        before = read_plan(stack)
        _require_idle(before, config, opened)
        plan = _next(before, config, opened, for_run)
        if fresh and opened is None and len(plan.known) > 1:  # Postgres will say which of them have an open run
            plan = StackPlan(waiting=before.known)
        plan = _placed(stack, plan, supervisor)
        if config.uses_model or not before.known:
            prepare_model(config, say)
        require_adapter(before, plan)
        if not stack.is_external("TEMPORAL_ADDRESS"):
            settle_temporal_kind(stack.home, say)
        _serve(stack, supervisor, before, plan, say)
    if fresh:
        say("starting the stack: " + ", ".join(part.name for part in stack.parts()))
    starts = log_sizes(stack)
    supervisor.up()
    settle = None if opened is not None else functools.partial(_settle_sets, stack, config, say, for_run)
    asyncio.run(_make_ready(stack, starts, settings, config, say, settle, moved))


def check_start(config: RunConfig, say: Callable[[str], None], compares_needs: bool = True) -> None:
    """Check what files of this machine show of a run; say how many tasks it has, and if its agent is missing.

    `compares_needs`: also what tasks need with what the config offers, which a new run refuses in any case.
    Raises ConfigError and DatasetError.
    """
    check_run(config, load_temporal_settings())
    LearnerModels(config).require_trainable()
    if missing := missing_program(config.harness.name):
        say(missing)
    for dataset in config.datasets if config.evaluation.forked_turn_id is None else ():
        num_tasks = sum(1 for _ in offered_rows(dataset, "", offers_of(config) if compares_needs else {}))
        say(f"{dataset.path}: {num_tasks} tasks for {dataset.use}")


def require_boxes(stack: Stack, say: Callable[[str], None]) -> None:
    """Check that this machine can make boxes; runs wait for a service. Raises MachineError and ConfigError."""
    if stack.has_gateway:
        machine_probe.require_sandbox_support()
        if id_mode().lacks:
            say(f"the local boxes are those of {id_mode().words}")
        if not (images := machine_probe.shared_images()).on:
            say(images.reason)
    elif docker_settings.needs_egress():
        asyncio.run(docker_egress.require_docker_egress())
    else:
        try:
            asyncio.run(sandbox_provider().list({"ratchet_probe": "start"}))
        except SandboxBusyError as error:
            say(str(error))


def keep_served(stack: Stack, config: RunConfig, say: Callable[[str], None]) -> None:
    """Keep the set, since the run has its row now; serve it again if another command has dropped it before."""
    if config.endpoint is not None or not Supervisor(stack).is_up():
        return
    with changing_plan(stack, say):
        plan = read_plan(stack)
        served = plan.sets.get(config.engine_set)
        if served is not None and served.asked_at:
            sets = plan.sets | {config.engine_set: served.model_copy(update={"asked_at": 0.0})}
            write_plan(stack, plan.model_copy(update={"sets": sets}))
    if served is None:
        try:
            _settle_sets(stack, config, say)
        except ConfigError as error:
            say(f"the engines of set {config.engine_set} do not run, and the run waits for them: {error}")


def _next(before: StackPlan, config: RunConfig, opened: Sequence[OpenSet] | None, for_run: bool) -> StackPlan:
    now = time.time()
    if config.endpoint is not None and before.known:  # the adapter of any model passes calls on to an endpoint
        wanted = before.known.get(config.engine_set) or next(iter(before.known.values()))
    else:
        wanted = ServingPlan(config=config, model_path=model_of(config))
    if for_run and config.endpoint is None:
        wanted = wanted.model_copy(update={"asked_at": now})
    return next_plan(before, wanted, plans_of(opened), now)


def _serve(
    stack: Stack, supervisor: Supervisor, before: StackPlan, plan: StackPlan, say: Callable[[str], None]
) -> bool:
    """Write the plan, after stopping the parts that read what has changed; `Supervisor.up` starts them again. Return
    whether anything but times has changed.

    If this is interrupted before the plan is written, the next `up` does it again. Engines that serve the same at the
    same place run on, while sets are added or dropped beside them or a placement changes.
    """
    if plan.without_times() == before.without_times() and stack.plan_path.is_file():
        if plan != before:
            write_plan(stack, plan)
        return False
    if supervisor.is_up():
        supervisor.stop(*_to_stop(stack, supervisor, before, plan, say), WATCHER)
    stack.record_ports()  # the next command chooses beside them
    write_plan(stack, plan)
    return True


def _to_stop(
    stack: Stack, supervisor: Supervisor, before: StackPlan, plan: StackPlan, say: Callable[[str], None]
) -> list[str]:
    """Return the parts other than the watcher that must not go on under the new plan, and say why."""
    if not stack.plan_path.is_file():  # so it is not known what the engines serve and on which GPUs
        running = [part.name for part in supervisor.states() if part_kind(part.name) == ENGINE]
        stopped = [*running, "adapter", *(["ray"] if learner_devices(plan) else [])]
        say(f"{stack.plan_path} is gone: restarting {', '.join(stopped)}")
        return stopped
    others = [one for one in before.sets if one in plan.sets and not serves_same(before.sets[one], plan.sets[one])]
    stopped = replaced_parts(before, plan)
    if others:
        stopped += ["adapter"] if len(plan.sets) == 1 else []  # beside other sets it reads the new plan by itself
        say(f"model or engine settings have changed: restarting {', '.join(stopped)}")
    elif stopped:
        say(f"engine sets or their placement have changed: ending {', '.join(stopped)}")
    for name in plan.sets.keys() - before.sets.keys():
        say(f"engine set {name} is added")
    return stopped


async def _open_sets(stack: Stack, fresh: bool = False) -> list[OpenSet] | None:
    """Return the engine sets with an open run; None if the store does not answer, or has no tables yet. `fresh`: the
    stack's own Postgres does not run, so that what listens on its port, if anything, is something else."""
    if fresh and not stack.is_external("RATCHET_DATABASE_URL"):
        return None
    try:
        async with stack.database() as database, database.begin() as connection:
            return await open_runs.open_sets(connection)
    except StoreUnavailableError:
        return None


async def _require_services(stack: Stack, settings: TemporalSettings) -> None:
    """Check the servers that the user's environment names before a part of this stack is started."""
    if stack.is_external("RATCHET_DATABASE_URL"):
        async with stack.database() as database:
            await database.wait(_ANSWER_SECONDS)
    if stack.is_external("TEMPORAL_ADDRESS"):
        await connect_stack(stack, settings, _ANSWER_SECONDS)


def _require_idle(before: StackPlan, config: RunConfig, opened: Sequence[OpenSet] | None) -> None:
    """Raise ConfigError if an open run of the set needs other engines; without a store no run is in progress."""
    for one in opened or ():
        needed = StackPlan(sets=before.known | (plans_of([one]) or {}))
        if one.engine_set == config.engine_set and wants_other(needed, config):
            raise ConfigError(
                f"run {one.run_id} is still open and its model or engine settings differ from this config's, which "
                f"names the same engine set ({one.engine_set}); wait for the run or cancel it, use its model, seed, "
                "engine and sampling.max_context_tokens here, or set another `engine_set`, which starts engines of "
                "its own"
            )


def _settle_sets(stack: Stack, config: RunConfig, say: Callable[[str], None], for_run: bool = False) -> None:
    """Serve the sets that have an open run, beside the one that is asked for, and no others; Postgres answers now.

    Raises ConfigError if they cannot run beside each other, or if an open run of the set needs other engines. The sets
    with an open run are then served without it, since they wait for nothing else.
    """
    supervisor, refusal = Supervisor(stack), None
    with changing_plan(stack, say):
        before, opened = read_plan(stack), asyncio.run(_open_sets(stack))
        try:
            _require_idle(before, config, opened)
            plan = _placed(stack, _next(before, config, opened, for_run), supervisor)
            require_adapter(before, plan)
        except ConfigError as error:
            refusal = error
            plan = _placed(stack, next_plan(before, None, plans_of(opened), time.time()), supervisor)
        has_changed = _serve(stack, supervisor, before, plan, say)
    if has_changed:
        supervisor.up()
    if refusal is not None:
        raise refusal


def _placed(stack: Stack, plan: StackPlan, supervisor: Supervisor) -> StackPlan:
    """Return the plan with GPUs, after choosing its ports. Raises ConfigError if two parts have the same."""
    plan = with_gpus(plan)
    runs_on = stack.plan_path.is_file() and supervisor.is_up()  # without the file every engine is restarted
    choose_ports(stack, plan, stack.engine_names() if runs_on else [])
    return plan


async def _make_ready(
    stack: Stack,
    starts: LogSizes,
    settings: TemporalSettings,
    config: RunConfig,
    say: Callable[[str], None],
    settle: Callable[[], None] | None,
    moved: bool | None,
) -> None:
    """Wait until every part answers. `settle`: serve the sets with an open run, unknown while the store was down."""
    if not stack.is_external("RATCHET_DATABASE_URL"):
        made = postgres.ensure_database(stack.ports["postgres"], math.inf, stack.postgres_password())
        await answer_of(stack, "postgres", made, starts, say)
    async with stack.database() as database:
        await database.wait()
        await asyncio.to_thread(migrate, database.url)
        await grant_reader_role(database)
        if settle is not None:
            await asyncio.to_thread(settle)
        is_own = not stack.is_external("TEMPORAL_ADDRESS")
        answer = connect_stack(stack, settings, math.inf if is_own else _ANSWER_SECONDS)
        client = await (answer_of(stack, "temporal", answer, starts, say) if is_own else answer)
        await temporal_namespace.prepare_namespace(client, database, settings, is_own, moved)
        say("Postgres and Temporal answer")
        if warning := await too_many_connections(stack, settings, config):
            say(warning)
        await wait_until_answering(stack, starts, say)
        say(f"every part answers: {stack.pages()}")
        if await worker_versions.make_current(client, settings, build_id()):
            say("the workers of this version get the work now")
        for run_id in await continue_runs(client, database, settings):
            say(f"run {run_id} continues")


async def connect_stack(stack: Stack, settings: TemporalSettings, wait_seconds: float = _REFUSED_SECONDS) -> Client:
    """Connect to the stack's Temporal server. Raises MachineError if nothing listens there for `wait_seconds`."""
    address = stack.environment()["TEMPORAL_ADDRESS"]
    return await temporal_client.connect_temporal(settings.model_copy(update={"address": address}), wait_seconds)


async def require_up(stack: Stack, what: str) -> None:
    """Raise MachineError if the stack was stopped, so that nothing starts its parts again. `what`: goes on later."""
    if not await asyncio.to_thread(Supervisor(stack).is_up):
        raise MachineError(f"the stack was stopped; {what} after `ratchet up`") from None


async def continue_runs(client: Client, database: Database, settings: TemporalSettings) -> list[str]:
    """Start the workflow of every open run that has none, for example after Temporal's database was lost."""
    unfinished = await database.run(open_runs.unfinished_runs)
    for run_id in unfinished:
        await temporal_client.start_train_run(client, settings, run_id)
    return unfinished
