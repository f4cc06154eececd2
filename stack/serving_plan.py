"""The plan of the local engines and the adapter: for each engine set a resolved config and the directory of its model.

`ratchet up` writes this file, and the supervised parts read it; an engine's part is told its set and its number.
"""

import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from ratchet.config import TINY_POLICIES, RunConfig
from ratchet.errors import MachineError
from ratchet.lora_slots import served_rank
from ratchet.model_directory import model_of, require_model
from ratchet.stored_config import read_stored_config
from stack.parts import Stack
from stack.placement import LEARNER, engine_name

if TYPE_CHECKING:
    from store.open_runs import OpenSet

_ROW_SECONDS = 600.0
"""The time that a run may spend on reading its weights before it has its row."""


class ServingPlan(BaseModel):
    """The config, model and GPUs of one engine set. `gpus`: part → its GPUs, which it keeps while the set is served.

    `asked_at`: the time at which a run that has no row yet asked for the set, in seconds since the epoch, else 0.
    """

    model_config = ConfigDict(frozen=True)

    config: RunConfig
    model_path: Path
    gpus: dict[str, tuple[int, ...]] = {}
    asked_at: float = 0.0


class StackPlan(BaseModel):
    """The engine sets of a stack, by name; the one that was added first is placed first.

    The engines of `sets` run. `waiting`: sets that were served before the stack was stopped, and of which it is not
    known yet whether a run is open.
    """

    model_config = ConfigDict(frozen=True)

    sets: dict[str, ServingPlan] = {}
    waiting: dict[str, ServingPlan] = {}

    @property
    def known(self) -> dict[str, ServingPlan]:
        """All sets, running or not."""
        return self.sets | self.waiting

    def without_times(self) -> "StackPlan":
        """Return what parts read of the plan."""
        sets, waiting = (
            {name: one.model_copy(update={"asked_at": 0.0}) for name, one in plans.items()}
            for plans in (self.sets, self.waiting)
        )
        return self.model_copy(update={"sets": sets, "waiting": waiting})


@contextmanager
def changing_plan(stack: Stack, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other command reads, decides on and writes this stack's plan: each would drop what the other one
    has added. The kernel releases the lock when a process ends."""
    stack.home.mkdir(parents=True, exist_ok=True)
    with stack.plan_path.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another command changes what this stack serves; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_plan(stack: Stack) -> StackPlan:
    """Return what the stack serves; nothing before the first `ratchet up`. Raises MachineError."""
    if not stack.plan_path.is_file():
        return StackPlan()
    try:
        return StackPlan.model_validate_json(stack.plan_path.read_text(), extra="ignore")  # of another version
    except ValidationError as error:
        raise MachineError(
            f"{stack.plan_path} cannot be read ({error.error_count()} problems); run `ratchet down`, delete it, "
            "and run `ratchet up CONFIG`"
        ) from None


def load_plan(stack: Stack) -> StackPlan:
    """Return what the stack serves. Raises MachineError if that is nothing."""
    found = read_plan(stack)
    if not found.sets:
        raise MachineError(f"{stack.plan_path} names nothing to serve; start the stack with `ratchet up`")
    return found


def wants_other(plan: StackPlan, config: RunConfig) -> bool:
    """Return whether the set's engines must restart to serve `config`. Creates and checks nothing."""
    kept = plan.known.get(config.engine_set)
    if config.endpoint is not None or kept is None:
        return False
    return not serves_same(kept, ServingPlan(config=config, model_path=model_of(config)))


def next_plan(
    before: StackPlan, wanted: ServingPlan | None, open_sets: Mapping[str, ServingPlan] | None, now: float = 0.0
) -> StackPlan:
    """Return what to serve if `wanted`, or nothing more, is asked for at `now`, in seconds since the epoch.

    `open_sets`: the sets with an open run, each with what its run's config asks for; None if the store does not answer.
    An open run gets what its config asks for, also if its set has served another model while it was stopped.

    | a set                                                              | the store answers | it does not answer |
    |--------------------------------------------------------------------|-------------------|--------------------|
    | is asked for                                                       | runs              | runs               |
    | has an open run                                                    | runs              | runs on, or waits  |
    | was asked for in the last ten minutes by a run that has no row yet | runs              | runs on, or waits  |
    | any other                                                          | ends              | runs on, or waits  |
    """
    new = {} if wanted is None else {wanted.config.engine_set: _or_served(before, wanted, _is_same)}
    if open_sets is None:
        waiting = {one: plan for one, plan in before.waiting.items() if one not in new}
        return before.model_copy(update={"sets": _in_order(before, before.sets | new), "waiting": waiting})
    asked = {one: plan for one, plan in before.known.items() if plan.asked_at and now - plan.asked_at < _ROW_SECONDS}
    opened = {one: _or_served(before, plan, serves_same) for one, plan in open_sets.items()}
    return before.model_copy(update={"sets": _in_order(before, asked | opened | new), "waiting": {}})


def _or_served(
    before: StackPlan, wanted: ServingPlan, is_enough: Callable[[ServingPlan, ServingPlan], bool]
) -> ServingPlan:
    """Return what the set serves if that is enough, else `wanted` with the GPUs of `before`."""
    served = before.known.get(wanted.config.engine_set)
    if served is None:
        return wanted
    asked_at = max(served.asked_at, wanted.asked_at)
    found = served if is_enough(served, wanted) else _with_kept(served, wanted)
    return found.model_copy(update={"asked_at": asked_at})


def _in_order(before: StackPlan, sets: dict[str, ServingPlan]) -> dict[str, ServingPlan]:
    """Return the sets in the order in which they were added."""
    return {name: sets[name] for name in dict.fromkeys([*before.known, *sets]) if name in sets}


def _with_kept(served: ServingPlan, wanted: ServingPlan) -> ServingPlan:
    """Return `wanted` with the GPUs of `served`, of parts that stay on their host."""
    old, new = _hosts(served.config), _hosts(wanted.config)
    kept = {part: gpus for part, gpus in served.gpus.items() if part == LEARNER or old.get(part, "") == new.get(part)}
    return wanted.model_copy(update={"gpus": kept})


def _hosts(config: RunConfig) -> dict[str, str]:
    """Return engine part → its host."""
    hosts = [entry.host for entry in config.engines for _ in range(entry.count)]
    return {engine_name(number, config.engine_set): host for number, host in enumerate(hosts, start=1)}


def _is_same(served: ServingPlan, wanted: ServingPlan) -> bool:
    """Return whether `served` is enough for `wanted`: equal in every key that a part reads, and GPUs for a learner if
    `wanted` trains. The learner of a set that was only evaluated has none, and an evaluation takes none away."""
    has_learner = served.config.training.steps > 0 or wanted.config.training.steps == 0
    return has_learner and serves_same(served, wanted) and _placed(served) == _placed(wanted)


def serves_same(plan: ServingPlan, other: ServingPlan) -> bool:
    """Return whether the engines of two plans do the same, though perhaps on other machines."""
    return _served(plan) == _served(other)


def plans_of(opened: "Sequence[OpenSet] | None") -> dict[str, ServingPlan] | None:
    """Return what the configs of open runs ask for, by engine set; None if it is not known which are open."""
    if opened is None:
        return None
    configs = {one.engine_set: read_stored_config(one.config) for one in opened if one.needs_engines}
    return {name: ServingPlan(config=config, model_path=model_of(config)) for name, config in configs.items()}


def require_adapter(before: StackPlan, plan: StackPlan) -> None:
    """Raise ConfigError if the adapter cannot use the tokenizer or template of a set that is added beside others.

    The adapter reads them at the set's first call, when it is late to say so; those of its first at its start.
    """
    if len(plan.sets) == 1:
        return
    from adapter.prompt.renderer import Renderer

    for name, one in plan.sets.items():
        known = before.sets.get(name)
        if known is None or not serves_same(known, one):
            engine = one.config.engine
            Renderer(one.model_path, engine.chat_template_kwargs, tuple(engine.stop_token_ids))


def prepare_model(config: RunConfig, say: Callable[[str], None]) -> Path:
    """Make or check the model, and return its directory."""
    model_path = model_of(config)
    if config.model in TINY_POLICIES:
        from examples.recipes import RECIPES
        from examples.tiny_policy.build import make_tiny_policy

        make_tiny_policy(model_path, config.seed, say, RECIPES[config.model])
    require_model(model_path)
    return model_path


def write_plan(stack: Stack, plan: StackPlan | ServingPlan) -> None:
    """Write what engines and adapter serve from their next start on, for several engine sets or one."""
    if isinstance(plan, ServingPlan):
        plan = StackPlan(sets={plan.config.engine_set: plan})
    stack.home.mkdir(parents=True, exist_ok=True)
    temporary = stack.plan_path.with_suffix(".tmp")
    temporary.write_text(plan.model_dump_json(indent=1))
    temporary.rename(stack.plan_path)


def _placed(plan: ServingPlan) -> tuple[object, ...]:
    training = plan.config.training
    return plan.config.engines, training.gpus, training.workers


def _served(plan: ServingPlan) -> tuple[object, ...]:
    """Return the parts of the plan that change what an engine or adapter does."""
    config = plan.config
    rank = None if config.training.lora is None else served_rank(config.training.lora.rank)
    of_training = (rank, config.training.router_replay)
    return plan.model_path, config.engine, config.sampling.max_context_tokens, of_training
