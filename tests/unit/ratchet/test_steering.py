"""Changes of a run that goes on: every key of the config has an answer, and a refusal says why."""

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.steering import (
    CHANGEABLE,
    changed_config,
    config_value,
    describe_request,
    require_changeable,
    with_last_step,
)
from ratchet.suggestions import config_keys
from ratchet.types import JsonObject


def stored(**sections: object) -> JsonObject:
    return RunConfig.model_validate({"datasets": [{"path": "unused"}], **sections}).model_dump(mode="json")


@pytest.mark.parametrize("key", sorted(config_keys(RunConfig)))
def test_every_key_may_change_or_says_why_not(key: str) -> None:
    if key in CHANGEABLE:
        return require_changeable(key)
    with pytest.raises(ConfigError) as refused:
        require_changeable(key)
    message = str(refused.value)
    assert message.startswith(key) and len(message) > len(key) + 20
    return None


@pytest.mark.parametrize("key", sorted(CHANGEABLE))
def test_every_changeable_key_exists(key: str) -> None:
    numbered = key.replace("datasets.", "datasets.0.")
    config = changed_config(stored(), {numbered: config_value(RunConfig.model_validate(stored()), numbered)})
    assert config == RunConfig.model_validate(stored())


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.max_stalness", "training.max_staleness"),
        ("max_boxes", "sandbox.max_boxes"),
        ("learning_rate", "training.learning_rate"),
        ("harness.max_turn", "harness.max_turns"),
    ],
)
def test_a_mistyped_key_is_recognised(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no such key; did you mean {meant}"):
        require_changeable(key)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training.max_staleness": -1}, r"training\.max_staleness: .*greater than or equal to 0 \(got -1\)"),
        ({"training.learning_rate": "fast"}, r"training\.learning_rate: .*valid number.*\(got 'fast'\)"),
        ({"sampling.temperature": 3}, r"sampling\.temperature: .*less than or equal to 2"),
        ({"sandbox.max_boxes": 1}, r"sandbox\.max_boxes: .*greater than or equal to 2"),
        ({"training.min_graded": 9}, r"min_graded is above training\.group_size"),
        ({"training.group_size": 3, "training.min_graded": 4}, r"min_graded is above"),
        ({"training.steps": 9}, "ratchet set --add-steps"),
        ({"seed": 9}, "plan rows follow from it"),
        ({"datasets.weight": 2}, r"name one of the 1 by its number, such as datasets\.0\.weight"),
        ({"datasets.3.weight": 2}, "expected a number from 0 to 0 instead of '3'"),
        ({"datasets.0.weight": 0}, r"at least one needs use: train, with a weight above 0"),
        ({"datasets.0.path": "other"}, "the run's task order was made from them"),
        ({"training": {}}, "is a section; name one of its keys: training.groups_per_step"),
    ],
)
def test_a_refusal_says_what_was_expected(changes: JsonObject, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        changed_config(stored(), changes)


def test_changes_are_judged_together() -> None:
    """Either alone would be refused."""
    changed = changed_config(stored(), {"training.group_size": 16, "training.min_graded": 12})
    assert (changed.training.group_size, changed.training.min_graded) == (16, 12)
    with pytest.raises(ConfigError):
        changed_config(stored(), {"training.min_graded": 12})


@pytest.mark.parametrize(("stop_at", "last"), [(None, 100), (0, 0), (7, 7), (100, 100), (200, 100)])
def test_the_last_step_of_a_stopped_run(stop_at: int | None, last: int) -> None:
    config = RunConfig.model_validate(stored())
    assert with_last_step(config, stop_at).training.steps == last


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (("set", "sandbox.adaptive", False, True), "set sandbox.adaptive: false → true"),
        (("set", "training.solve_rates", None, [0.1, 0.9]), "set training.solve_rates: null → [0.1, 0.9]"),
        (("set", "training.solve_rates", [0.1, 0.9], None), "set training.solve_rates: [0.1, 0.9] → null"),
        (("stop", "", "none", {"wish": "stop", "stop_at": 3}), "stop after step 3"),
        (("pause", "", "running", "paused"), "pause: running → paused"),
        (
            ("evaluate", "asked1-t0", None, {"temperature": 0.0, "samples": 1}),
            "evaluate asked1-t0: {temperature: 0.0, samples: 1}",
        ),
        (("skip_step", "step/5", ["group/a/1"], "discarded"), "skip step 5: [group/a/1] → discarded"),
    ],
)
def test_a_request_is_told_with_values_as_in_a_config(request_: tuple[str, str, object, object], expected: str) -> None:
    assert describe_request(*request_) == expected
