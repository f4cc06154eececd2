"""The settings in which runs differ."""

from reads.run_comparison import DifferentSetting, different_settings


def test_only_settings_that_differ_are_listed_by_their_keys() -> None:
    first = {"seed": 0, "loss": {"lr": 1e-4, "preset": "grpo"}, "datasets": [{"path": "a"}], "endpoint": {}}
    second = {"seed": 0, "loss": {"lr": 2e-4}, "datasets": [{"path": "b"}], "endpoint": {}}
    assert different_settings([first, second]) == [
        DifferentSetting("datasets", [[{"path": "a"}], [{"path": "b"}]]),
        DifferentSetting("loss.lr", [1e-4, 2e-4]),
        DifferentSetting("loss.preset", ["grpo", None]),
    ]
    assert different_settings([first, first]) == [] == different_settings([first])
