"""What the local engine and adapter serve: a resolved config and the directory of its model.

Supervised parts take no arguments; `ratchet up` writes this file and the parts read it.
"""

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ratchet.config import TINY, RunConfig
from ratchet.errors import ConfigError, MachineError
from ratchet.model_directory import model_of, require_config, require_model
from stack.parts import Stack


class ServingPlan(BaseModel):
    model_config = ConfigDict(frozen=True)

    config: RunConfig
    model_path: Path


def load_plan(stack: Stack) -> ServingPlan:
    if not stack.plan_path.is_file():
        raise MachineError(f"{stack.plan_path} is missing; start the stack with `ratchet up`")
    try:
        return ServingPlan.model_validate_json(stack.plan_path.read_text())
    except ValidationError as error:
        raise MachineError(
            f"{stack.plan_path} cannot be read ({error.error_count()} problems); delete it and run `ratchet up CONFIG`"
        ) from None


def wants_other(stack: Stack, config: RunConfig) -> bool:
    """Return whether engine and adapter must be restarted to serve `config`. Creates and checks nothing.

    The adapter of any model passes calls on to an endpoint.
    """
    if config.endpoint is not None:
        return False
    wanted = ServingPlan(config=config, model_path=model_of(config))
    return stack.plan_path.is_file() and _served(load_plan(stack)) != _served(wanted)


def differs(stack: Stack, plan: ServingPlan) -> bool:
    """Return whether the plan that is served is another one in any key that a part reads, placement included."""
    if not stack.plan_path.is_file():
        return True
    kept = load_plan(stack)
    return (_served(kept), _placed(kept)) != (_served(plan), _placed(plan))


def prepare_plan(config: RunConfig, say: Callable[[str], None]) -> ServingPlan:
    """Make or check the model and return the plan."""
    model_path = model_of(config)
    if config.model == TINY:
        from stack.tiny_policy.build import make_tiny_policy

        make_tiny_policy(model_path, config.seed, say)
    require_model(model_path)
    require_experts(config)
    return ServingPlan(config=config, model_path=model_path)


def require_experts(config: RunConfig) -> None:
    """Raise ConfigError if the model does not allow what `training.router_replay` or `expert_parallel` asks for."""
    training = config.training
    if not training.router_replay and training.expert_parallel == 1:
        return
    model = model_of(config)
    no_replay: str | None
    undivided: str | None
    if config.model == TINY:
        no_replay = undivided = "the tiny policy has no experts"
    else:
        from training.memory_estimate import read_sizes
        from training.service import default_workers

        require_config("model", model)
        try:
            ranks_of_copy = training.shard_ranks or default_workers(config)
            sizes = read_sizes(model, expert_parallel=training.expert_parallel, ranks_of_copy=ranks_of_copy)
            no_replay, undivided = sizes.no_replay, sizes.undivided
        except (OSError, ValueError, AttributeError, KeyError) as error:
            no_replay = undivided = f"{model} cannot be trained here: {error}"
    if training.router_replay and no_replay is not None:
        raise ConfigError(f"training.router_replay: {no_replay}; leave it out")
    if training.expert_parallel > 1 and undivided is not None:
        raise ConfigError(f"training.expert_parallel: {undivided}; use another number, or leave it out")


def write_plan(stack: Stack, plan: ServingPlan) -> None:
    """Write what an engine or adapter serves from its next start on."""
    stack.home.mkdir(parents=True, exist_ok=True)
    temporary = stack.plan_path.with_suffix(".tmp")
    temporary.write_text(plan.model_dump_json(indent=1))
    temporary.rename(stack.plan_path)


def _placed(plan: ServingPlan) -> tuple[object, ...]:
    return plan.config.engines, plan.config.training.gpus, plan.config.training.workers


def _served(plan: ServingPlan) -> tuple[object, ...]:
    """Return the parts of the plan that change what an engine or adapter does."""
    config = plan.config
    of_training = (config.training.lora and config.training.lora.rank, config.training.router_replay)
    return plan.model_path, config.engine, config.sampling.max_context_tokens, of_training
