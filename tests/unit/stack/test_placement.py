"""The assignment of parts to GPUs and nodes: made from the config alone, and refused by name if it is impossible."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.config_engines import LOCAL
from ratchet.config_sources import load_config
from ratchet.errors import ConfigError
from stack.learner_models import LearnerModels
from stack.placement import LEARNER, PlacedGpu, SetToPlace, gpus_per_engine, place, place_sets
from stack.run_size import describe_run

FAR = "10.0.0.2"


def config(engines: Any = 1, gpus: Any = None, **training: Any) -> RunConfig:
    values = {"datasets": [{"path": "x"}], "engines": engines, "training": {"gpus": gpus, **training}}
    return RunConfig.model_validate(values)


def table(found: RunConfig, num_ranks: int, **num_gpus: int) -> list[tuple[str, int | None, str]]:
    placed = place(found, num_ranks, {name.replace("_", "."): number for name, number in num_gpus.items()})
    return [(row.node, row.gpu, row.part) for row in placed.rows()]


def test_a_machine_without_gpus_has_engines_and_a_learner_all_the_same() -> None:
    assert table(config(2), 2, local=0) == [(LOCAL, None, "engine"), (LOCAL, None, "engine-2"), (LOCAL, None, LEARNER)]


def test_engines_take_the_first_gpus_and_the_learner_the_rest() -> None:
    found = config([{"count": 2, "args": ["-tp", "2"]}])
    parts = ["engine", "engine", "engine-2", "engine-2", LEARNER, LEARNER]
    assert table(found, 2, local=6) == [(LOCAL, gpu, part) for gpu, part in enumerate(parts)]


def test_one_engine_and_the_learner_share_the_only_gpu_if_nothing_else_is_said() -> None:
    assert table(config(), 1, local=1) == [(LOCAL, 0, "engine"), (LOCAL, 0, LEARNER)]
    with pytest.raises(ConfigError, match="1 ranks need a GPU each and have 0"):
        place(config(2), 1, {LOCAL: 2})


SHARE = ["--gpu-memory-utilization", "0.3"]


def test_a_gpu_that_is_named_for_both_is_shared_if_the_engine_names_its_memory() -> None:
    engines = [{"gpus": [0, 1], "count": 2, "args": SHARE}, {"gpus": [3]}]
    found = place(config(engines, {LOCAL: [1, 2]}), 2, {LOCAL: 4})
    assert found.learner == {LOCAL: (1, 2)} and [engine.gpus for engine in found.engines] == [(0,), (1,), (3,)]
    assert (found.engine_share, found.rank_share) == (0.3, 0.65)
    assert found.rank_variables["PYTORCH_ALLOC_CONF"].endswith("per_process_memory_fraction:0.65")
    assert found.engines[2].args == (), "it shares with nobody"
    alone = place(config([{"gpus": [0, 1], "count": 2, "args": SHARE}], {LOCAL: [2]}), 1, {LOCAL: 3})
    assert (alone.engine_share, alone.rank_share, alone.rank_variables) == (0, 1, {})


def test_an_engine_leaves_memory_to_a_learner_only_where_one_is() -> None:
    (engine,) = place(config(), 1, {LOCAL: 1}).engines
    assert engine.args == ("--gpu-memory-utilization", "0.4")
    evaluation = {"datasets": [{"path": "x", "use": "eval"}], "training": {"steps": 0}}
    assert place(RunConfig.model_validate(evaluation), 1, {LOCAL: 1}).engines[0].args == ()


def test_named_gpus_come_before_chosen_ones() -> None:
    found = config([{"count": 1}, {"gpus": [0]}], {LOCAL: [2]}, workers=1)
    assert table(found, 1, local=3) == [(LOCAL, 0, "engine-2"), (LOCAL, 1, "engine"), (LOCAL, 2, LEARNER)]


def test_engines_and_learner_on_several_nodes() -> None:
    engines = [{"host": FAR, "count": 2, "gpus": [0, 1]}, {"address": "http://10.0.0.9:8000"}]
    found = place(config(engines, {FAR: [2, 3]}), 2, {LOCAL: 0, FAR: 4})
    assert [(one.name, one.node, one.port, one.gpus) for one in found.engines] == [
        ("engine", FAR, 18100, (0,)),
        ("engine-2", FAR, 18101, (1,)),
        ("engine-3", "10.0.0.9", None, ()),
    ]
    assert found.learner == {FAR: (2, 3)}
    assert PlacedGpu("10.0.0.9", None, "engine-3") in found.rows()
    assert place(config([{"host": FAR, "args": ["--pipeline-parallel-size=4"]}]), 1, {}).engines[0].gpus == (0, 1, 2, 3)


@pytest.mark.parametrize(("engines", "gpus", "named"), [
    ([{"gpus": [0]}, {"gpus": [0]}], None, "GPU 0 of local is given to engine and to engine-2"),
    ([{"gpus": [1]}], {LOCAL: [1, 2]}, "GPU 1 of local is given to engine and to learner"),
    ([{"gpus": [0], "args": SHARE}], {LOCAL: [0, 0]}, "GPU 0 of local is given to learner and to learner"),
    ([{"gpus": [1, 1], "args": ["-tp=2"]}], None, "GPU 1 of local is given to engine and to engine"),
    ([{"gpus": [4]}], None, "engine is given GPU 4 of local, which has GPUs 0 to 3"),
    (1, {LOCAL: [9]}, "learner is given GPU 9 of local"),
    ([{"gpus": [0, 1]}], None, "engine is given 2 GPUs of local, but its vLLM arguments use 1"),
    ([{"count": 2, "gpus": [0, 1, 2]}], None, "3 GPUs of local cannot be shared out to 2 engines evenly"),
    (5, None, "engine-5 needs 1 GPUs of local, of whose 4 only 0 are free"),
    (4, None, "the learner's 2 ranks need a GPU each and have 0"),
    (1, {LOCAL: [3]}, "the learner's 2 ranks need a GPU each and have 1"),
    ([{"host": FAR}, {"host": FAR, "port": 18100}], None, "port 18100 of 10.0.0.2 is given to 2 engines"),
    ([{"address": "http://a:1"}, {"address": "http://a:1/"}], None, "port 1 of a is given to 2 engines"),
    ([{"address": "http://127.0.0.1:9"}, {"port": 9}], None, "port 9 of local is given to 2 engines"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(engines: Any, gpus: Any, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place(config(engines, gpus), 2, {LOCAL: 4})
    assert named in str(refused.value)


def two_sets(engines: Any = 1, gpus: Any = None, others: Any = 1, their_gpus: Any = None) -> list[SetToPlace]:
    found = [config(engines, gpus), config(others, their_gpus)]
    return [SetToPlace(found[0], 1), SetToPlace(found[1].model_copy(update={"engine_set": "b"}), 1)]


def test_sets_are_placed_beside_each_other() -> None:
    placed = place_sets(two_sets(1, {LOCAL: [1]}, [{"count": 2}], {LOCAL: [4]}), {LOCAL: 5})
    assert {one.name: one.gpus for name in placed for one in placed[name].engines} == {
        "engine": (0,), "engine-b": (2,), "engine-b-2": (3,)
    }  # fmt: skip
    assert {name: one.learner for name, one in placed.items()} == {"default": {LOCAL: (1,)}, "b": {LOCAL: (4,)}}


@pytest.mark.parametrize(("sets", "named"), [
    (two_sets([{"gpus": [0]}], {LOCAL: [1]}, [{"gpus": [0]}], {LOCAL: [2]}),
     "GPU 0 of local is given to engine (engine set default) and to engine-b (engine set b)"),
    (two_sets(1, {LOCAL: [1]}, 1, {LOCAL: [1]}),
     "GPU 1 of local is given to learner (engine set default) and to learner (engine set b)"),
    (two_sets(), "engine-b (engine set b) needs 1 GPUs of local, of whose 4 only 0 are free (the others: engine "
     "(engine set default), learner (engine set default))"),
    (two_sets([{"host": FAR, "gpus": [0]}], {FAR: [1]}, [{"host": FAR, "gpus": [2]}], {FAR: [3]}),
     "port 18100 of 10.0.0.2 is given to 2 engines (engine, engine-b)"),
])  # fmt: skip
def test_sets_that_need_the_same_are_refused_by_name(sets: list[SetToPlace], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place_sets(sets, {LOCAL: 4})
    assert named in str(refused.value)


@pytest.mark.parametrize(("name", "part"), [("b", "engine-b"), ("gpu-box_2", "engine-gpu-box_2")])
def test_every_set_has_part_names_of_its_own(name: str, part: str) -> None:
    values = {"datasets": [{"path": "x"}], "engines": 2, "engine_set": name}
    placed = place(RunConfig.model_validate(values), 1, {LOCAL: 0})
    assert [one.name for one in placed.engines] == [part, f"{part}-2"]


@pytest.mark.parametrize("name", ["", "2", "b-2", "a b", "ä", "x" * 32, "-b"])
def test_a_set_whose_parts_could_be_those_of_another_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of an engine set"):
        RunConfig.model_validate({"datasets": [{"path": "x"}], "engine_set": name})


@pytest.mark.parametrize(("args", "number"), [
    ([], 1), (["-tp", "4"], 4), (["--tensor-parallel-size=2", "--data_parallel_size", "3", "-pp=2"], 12),
    (["-tp", "4", "-tp", "2"], 2), (["--max-num-seqs", "4"], 1),
])  # fmt: skip
def test_parallel_arguments_say_how_many_gpus_an_engine_uses(args: list[str], number: int) -> None:
    assert gpus_per_engine(args) == number


@pytest.mark.parametrize(("entry", "named"), [
    ({"address": "10.0.0.9:8000"}, "expected an address such as"),
    ({"address": "http://10.0.0.9:8000", "gpus": [0]}, "already runs"),
    ({"port": 70000}, "less than 65536"),
    ({"gpus": [-1]}, "greater than or equal to 0"),
])  # fmt: skip
def test_an_entry_that_means_nothing_is_refused(entry: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config([entry])


def test_the_table_is_printed_node_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))  # without the policy whose memory would be told
    found = config([{"count": 2}, {"host": FAR, "gpus": [0, 1], "args": ["-tp", "2"]}], None, workers=1)
    num_gpus = {LOCAL: 3, FAR: 4}
    lines = describe_run(LearnerModels(found), place(found, 1, num_gpus), num_gpus)
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines[:7]] == [
        ["node", LOCAL, "(3", "GPUs)"],
        ["GPU", "0", "engine"],
        ["GPU", "1", "engine-2"],
        ["GPU", "2", LEARNER],
        ["node", FAR, "(4", "GPUs)"],
        ["GPU", "0", "engine-3"],
        ["GPU", "1", "engine-3"],
    ]
    assert lines[7] == "unused: 2 GPUs of 10.0.0.2, from 2 on"


def test_the_config_of_one_card_divides_its_memory() -> None:
    found = load_config(Path(__file__).parents[3] / "configs/one_gpu.yaml", [])
    placed = place(found, 1, {LOCAL: 1})
    assert (placed.engines[0].gpus, placed.learner) == ((0,), {LOCAL: (0,)})
    assert (placed.engine_share, placed.rank_share) == (0.4, 0.55)
    lines = describe_run(LearnerModels(found), placed, {LOCAL: 1})
    assert "of a shared GPU an engine has 40% of the memory, a rank 55%" in lines
