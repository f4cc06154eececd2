"""The config keys of a run that may change while it runs, and the config after a change.

    command, update   it writes            who reads it              when it acts
    set               run.config           advance_run, plan         the next groups, the next plan row
                                           stages of rollouts        within two seconds (boxes)
                                           learner                   by the plan row (learning rate)
    extend            run.config (steps)   advance_run, plan,        the next decision; an ended run is started again
                                           learner
    pause, resume     run.state            TrainRun, plan, learner   the next decision; what is in flight goes on
    drain             run.wish             advance_run               no group is made from now on
    stop              run.wish, .stop_at   TrainRun, plan, learner   after the step that is planned

All of it is in the run's row, in the transaction that also writes the audit row (`store/steering.py`), under
the lock that planning takes. So a change acts from a known step on, and a lost signal, a reset of the workflow or a
crash of any process loses nothing: each decision reads the row.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from ratchet.config import RunConfig
from ratchet.config_sources import explain_validation
from ratchet.errors import ConfigError
from ratchet.stored_config import read_stored_config
from ratchet.suggestions import config_keys, did_you_mean
from ratchet.types import JsonObject, SteeringAction

CHANGEABLE = {
    "training.groups_per_step": "the next plan",
    "training.min_groups": "the next plan",
    "training.max_groups_seen": "the next plan",
    "training.max_staleness": "the next plan",
    "training.learning_rate": "the next plan; the plan row holds the value that its step is trained with",
    "training.group_size": "groups that are made from now on",
    "training.min_graded": "groups that are made from now on",
    "training.max_replacements": "members that end from now on",
    "training.solve_rates": "groups that are made from now on",
    "training.solve_rate_steps": "groups that are made from now on",
    "sampling.temperature": "groups that are made from now on",
    "sandbox.max_boxes": "boxes that boot from now on",
    "sandbox.adaptive": "boxes that boot from now on",
    "datasets.weight": "groups that are made from now on",
    "evaluation.every": "evaluations that have not begun",
    "evaluation.at": "evaluations that have not begun",
    "evaluation.temperatures": "evaluations that have not begun",
    "evaluation.samples": "evaluations that have not begun",
}
"""Key → what a change of it acts on."""

_NUMBER = re.compile(r"\.\d+")
_FIXED = {
    "model": "the run's weights descend from it; start another run",
    "init_from": "the run has started from it; start another run",
    "retrain": "its first plan rows are written; start another run",
    "seed": "the task order and the plan rows follow from it",
    "drift": "stored chains were built with it, and one step must not mix both kinds",
    "endpoint": "one evaluation would mix the answers of two models; start another one",
    "engine": "engines read it when they start, for every run: change the config and run `ratchet up`",
    "engines": "they are placed when the stack starts: change the config and run `ratchet up`",
    "engine_set": "these engines have its weights and its calls; start another run, with init_from",
    "datasets": "the run's task order was made from them; start another run, with init_from",
    "harness": "one step would mix rollouts of different agents; start another run, with init_from",
    "sandbox": "boxes of different sizes are not comparable; start another run, with init_from",
    "sampling": "rollouts in flight were started with it, and their limits must agree with the learner's",
    "loss": "curves before and after the change would not be comparable; start another run, with init_from",
    "evaluation": "the evaluation at the start has used it",
    "metrics": "the learner reads it when it starts; a restart of the learner would mix both",
    "grading": "one step would have rewards by different rules; `ratchet tasks regrade` judges stored patches again",
    "limits": "rollouts of one group would have different limits; start another run, with init_from",
    "training.steps": "`ratchet set --add-steps` adds steps, and `ratchet stop` ends a run early",
    "training": "the learner reads it when it starts, and a replay must train the same",
}
"""Key or section → why it cannot change while a run goes on. The longest match counts."""


def require_changeable(key: str) -> None:
    """Raise ConfigError, with the reason, if the key does not exist or may not change while a run goes on."""
    key = _NUMBER.sub("", key)  # datasets.0.weight
    if key in CHANGEABLE:
        return
    known = set(config_keys(RunConfig))
    if key not in known:
        raise ConfigError(f"{key}: there is no such key{did_you_mean(key, CHANGEABLE) or did_you_mean(key, known)}")
    if any(one.startswith(f"{key}.") for one in known):
        inside = [one for one in CHANGEABLE if one.startswith(f"{key}.")]
        raise ConfigError(f"{key} is a section; name one of its keys" + (f": {', '.join(inside)}" if inside else ""))
    reason = next(_FIXED[name] for name in (key, key.partition(".")[0]) if name in _FIXED)
    raise ConfigError(f"{key} cannot change while a run goes on: {reason}. These can: {', '.join(CHANGEABLE)}")


def acts_on(key: str) -> str:
    return CHANGEABLE[_NUMBER.sub("", key)]


def config_value(config: RunConfig, key: str) -> Any:
    """Return the value of a dotted key as JSON. Raises ConfigError if it numbers an element that there is not."""
    *parents, leaf = key.split(".")
    return _section(config.model_dump(mode="json"), parents, key)[leaf]


def _section(tree: Any, names: Sequence[str], key: str) -> Any:
    """Return what is below these names and numbers."""
    for name in names:
        if not isinstance(tree, list):
            tree = tree[name]
        elif name.isdigit() and int(name) < len(tree):
            tree = tree[int(name)]
        else:
            raise ConfigError(f"{key}: expected a number from 0 to {len(tree) - 1} instead of {name!r}")
    if isinstance(tree, list):
        raise ConfigError(f"{key}: name one of the {len(tree)} by its number, such as datasets.0.weight")
    return tree


def changed_config(stored: JsonObject, changes: Mapping[str, Any]) -> RunConfig:
    """Return the config of a run's row with the changes, validated as a whole. Raises ConfigError."""
    for key in changes:
        require_changeable(key)
    return with_values(stored, changes)


def with_values(stored: JsonObject, values: Mapping[str, Any]) -> RunConfig:
    """Return the config of a run's row with other values of any keys. Raises ConfigError."""
    tree: Any = read_stored_config(stored).model_dump(mode="json")
    for key, value in values.items():
        *parents, leaf = key.split(".")
        _section(tree, parents, key)[leaf] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise explain_validation(error, "the changed config") from None


def with_last_step(config: RunConfig, stop_at: int | None) -> RunConfig:
    """Return the config of a run that ends after step `stop_at`, if that is before its last step."""
    if stop_at is None or stop_at >= config.training.steps:
        return config
    training = config.training.model_copy(update={"steps": stop_at})
    return config.model_copy(update={"training": training})


STEP_TARGET = "step/"
"""The beginning of a request's target if it is about a step of its run."""


def describe_request(action: str, target: str, before: Any, after: Any) -> str:
    """Return what a person asked and what it changed, with values as in a config file: `skip step 5: …`."""
    asked = f"{action.replace('_', ' ')} {target.removeprefix(STEP_TARGET)}".strip()
    if isinstance(after, dict) and "stop_at" in after:  # of `ratchet stop`
        return f"{asked} after step {after['stop_at']}"
    if before is None and action != SteeringAction.SET:
        return asked if after is None else f"{asked}: {_written(after)}"
    return f"{asked}: {_written(before)} → {_written(after)}"


def _written(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
