"""A list of hosts is enough: each gets a part, and what the config places stays where it is."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, MachineError
from stack.cluster import Cluster
from stack.placement import Placement, place
from stack.spread import spread, with_gpus
from training.service import default_workers


def placed(num_gpus: dict[str, int], engine_gpus: int | None = None, **values: Any) -> Placement:
    config = spread(RunConfig.model_validate({"datasets": [{"path": "x"}], **values}), num_gpus, engine_gpus)
    return place(config, default_workers(config), num_gpus)


def engines(found: Placement) -> list[tuple[str, tuple[int, ...]]]:
    return [(engine.node, engine.gpus) for engine in found.engines]


TWO = {"engine": {"args": ["-tp", "2"]}}


def test_engines_and_learner_share_all_gpus() -> None:
    found = placed({"local": 1, "a": 2})
    assert engines(found) == [("local", (0,)), ("a", (0,)), ("a", (1,))]
    assert found.learner == {"local": (0,), "a": (0, 1)}
    assert (found.engine_share, found.rank_share) == (0.4, 0.55)
    assert {engine.args for engine in found.engines} == {("--gpu-memory-utilization", "0.4")}
    found = placed({"local": 0, "a": 3, "b": 5}, **TWO)
    assert engines(found) == [("a", (0, 1)), ("b", (0, 1)), ("b", (2, 3))]
    assert found.learner == {"a": (0, 1, 2), "b": (0, 1, 2, 3, 4)}, "also those that are too few for an engine"


def test_a_machine_alone_shares_its_gpus() -> None:
    found = placed({"local": 2})
    assert engines(found) == [("local", (0,)), ("local", (1,))] and found.learner == {"local": (0, 1)}
    assert engines(placed({"local": 0})) == [("local", ())]


def test_the_share_of_the_config_holds() -> None:
    found = placed({"local": 0, "a": 2}, engine={"args": ["--gpu-memory-utilization=0.6"]})
    assert (found.engine_share, found.rank_share) == (0.6, 0.35) and found.engines[0].args == ()


def test_one_setting_splits() -> None:
    found = placed({"local": 2, "a": 2}, 3)
    assert engines(found) == [("local", (0,)), ("a", (0,)), ("a", (1,))] and found.learner == {"local": (1,)}
    assert placed({"local": 0, "a": 3, "b": 2}, 2, **TWO).learner == {"a": (0, 1, 2)}


def test_nothing_is_left_for_a_learner_that_trains_nothing() -> None:
    only = {"datasets": [{"path": "x", "use": "eval"}], "training": {"steps": 0}}
    assert len(placed({"local": 1, "a": 2}, **only).engines) == 3


def test_hosts_without_gpus_have_an_engine_each() -> None:
    found = placed({"local": 0, "a": 0, "b": 0})
    assert engines(found) == [("a", ()), ("b", ())] and found.learner == {}


def test_what_the_config_places_stays() -> None:
    found = placed({"local": 1, "a": 2}, engines=[{"host": "a", "gpus": [1]}])
    assert engines(found) == [("a", (1,))] and found.learner == {"local": (0,), "a": (0,)}
    found = placed({"local": 1, "a": 2}, training={"gpus": {"a": [0]}})
    assert engines(found) == [("local", (0,)), ("a", (1,))] and found.learner == {"a": (0,)}


@pytest.mark.parametrize(("num_gpus", "values", "named"), [
    ({"local": 0, "a": 2}, TWO | {"engines": [{"host": "a"}]}, "the learner's . ranks need a GPU each and have 0"),
    ({"local": 1, "a": 1}, TWO, "engine needs 2 GPUs of local, of whose 1 only . are free"),
])  # fmt: skip
def test_too_few_gpus_are_named(num_gpus: dict[str, int], values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        placed(num_gpus, **values)


SSH = """#!{python}
import sys
host = sys.argv[-2]
if host == "10.0.0.4":
    sys.exit("Permission denied (publickey)")
print("GPU 0: NVIDIA H100 (UUID: x)\\nGPU 1: NVIDIA H100 (UUID: y)" if host == "10.0.0.2" else "")
"""


def test_a_host_without_slots_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH.format(python=sys.executable))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts: dict[str, Any] = {"10.0.0.2": {}, "10.0.0.3": {}, "10.0.0.5": {"gpus": 7}, "10.0.0.6": {"boxes": True}}
    found = with_gpus(Cluster.model_validate({"head": "10.0.0.1", "hosts": hosts}))
    assert found.num_gpus(0) == {"local": 0, "10.0.0.2": 2, "10.0.0.3": 0, "10.0.0.5": 7}
    with pytest.raises(MachineError, match=r"host 10.0.0.4 does not say .*Permission denied.*slots=N"):
        with_gpus(Cluster.model_validate({"head": "10.0.0.1", "hosts": {"10.0.0.4": {}}}))
