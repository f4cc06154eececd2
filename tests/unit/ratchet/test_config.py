"""The run's config: precedence of its sources, and errors that name key, value and remedy."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import orjson
import pytest
from pydantic import BaseModel, ValidationError

from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from ratchet.errors import ConfigError
from ratchet.steering import with_values
from ratchet.stored_config import config_digest, known_digests, read_stored_config
from ratchet.temporal_settings import QUEUES, load_temporal_settings

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tasks.jsonl").write_text("{}")
    found = tmp_path / "run.yaml"
    found.write_text("datasets: [{path: tasks.jsonl}]\ntraining: {steps: 3}\nlimits: {agent_seconds: 11}\n")
    return found


def test_precedence(path: Path) -> None:
    """--set overrides RATCHET_*, which overrides a SWE_* variable, which overrides the file, which overrides the
    default."""
    environment = {
        "SWE_AGENT_TIME_BUDGET_SEC": "12",
        "SWE_EVAL_TIMEOUT_SEC": "13",
        "RATCHET_TRAINING__STEPS": "4",
        "RATCHET_HOME": "/x",
    }
    config = load_config(path, [], environment)
    assert (config.limits.agent_seconds, config.limits.eval_seconds, config.training.steps) == (12, 13, 4)
    environment["RATCHET_LIMITS__AGENT_SECONDS"] = "14"
    config = load_config(path, ["training.steps=5"], environment)
    assert (config.limits.agent_seconds, config.training.steps, config.training.group_size) == (14, 5, 8)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.stepz=3", "training.stepz: there is no such key; did you mean training.steps?"),
        ("training.steps=-1", "training.steps: Input should be greater than or equal to 0 (got -1)"),
        ("sampling.top_p=0.9", "sampling.top_p: there is no such key: it would sample from another distribution"),
        ("engine.args=[--logits-processors=x]", "engine.args: --logits-processors=x is refused"),
        (
            "training.steps={a} b",
            "training.steps: Input should be a valid integer, unable to parse string as an integer (got '{a} b')",
        ),
        ("training.steps=2147483648", "training.steps: Input should be less than or equal to 2147483647"),
        ("training.learning_rate=.inf", "training.learning_rate: Input should be a finite number (got inf)"),
        ("evaluation.temperatures=[.nan]", "evaluation.temperatures.0: Input should be a finite number (got nan)"),
        ("limits.agent_seconds=1e300", "limits.agent_seconds: Input should be less than or equal to 1000000000"),
        (
            "seed=1180591620717411303424",
            "seed: Input should be less than 9223372036854775808 (got 1180591620717411303424)",
        ),
        ('harness.prompt="a\\0"', "harness.prompt: contains NUL or half a surrogate pair"),
        ('harness.prompt="\\ud800"', "harness.prompt: contains NUL or half a surrogate pair"),
        ('harness.options={a: [{b: "\\0"}]}', "harness.options: a.0.b: contains NUL or half a surrogate pair"),
        ("harness.options={a: .inf}", "harness.options: a: is inf, and not a finite number"),
        ("harness.options={a: &a [*a]}", "harness.options: a.0.0: is more than 100 lists and objects deep"),
        ("nonsense", "expected KEY=VALUE"),
        ("model.x=1", "model"),
        ("training.group_size=1", "group_size must be at least 2"),
        ("training.bin_tokens=1000", "training.bin_tokens (1000) is below sampling.max_context_tokens (32768)"),
    ],
)
def test_a_wrong_value_is_named(path: Path, override: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(path, [override], {})
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{problem_statement} in {workdir}", "fix: this: now", "@here", "2026-99-99"])
def test_a_value_that_is_not_yaml_is_kept_as_text(path: Path, text: str) -> None:
    assert load_config(path, [f"harness.prompt={text}"], {}).harness.prompt == text
    assert load_config(path, [], {"RATCHET_HARNESS__PROMPT": text}).harness.prompt == text


def test_unknown_keys_of_the_environment_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.stepz"):
        load_config(path, [], {"RATCHET_TRAINING__STEPZ": "1"})


def test_paths_are_resolved_against_the_config(path: Path) -> None:
    assert load_config(path, [], {}).datasets[0].path == str(path.parent / "tasks.jsonl")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "expected a mapping"),
        ("{}", "datasets: missing"),
        ("datasets: [{path: x}]\ntraining: {group_size: 4, min_graded: 5}", "min_graded is above training.group_size"),
        ("datasets: [{path: x}]\nsandbox: {max_boxes: 1}", "sandbox.max_boxes"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused(tmp_path: Path, text: str, named: str) -> None:
    found = tmp_path / "run.yaml"
    found.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_config(found, [], {})


def test_a_missing_dataset_and_a_missing_file(path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(path, ["datasets=[{path: nowhere.jsonl}]"], {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path.with_name("none.yaml"), [], {})


def test_the_digest_tells_configs_apart(path: Path) -> None:
    first, second = load_config(path, [], {}), load_config(path, ["seed=1"], {})
    assert (
        config_digest(first)
        == config_digest(RunConfig.model_validate(first.model_dump(mode="json")))
        != config_digest(second)
    )


def test_runs_of_an_earlier_release_are_recognised_although_defaults_have_changed() -> None:
    """By the digests that version 0.1.0 stored, of values that differed from its defaults."""
    plain = {"datasets": [{"path": "d.jsonl"}], "training": {"groups_per_step": 4}}
    for changes, stored in (
        ({}, {}),
        ({"sandbox": {"adaptive": True}}, {"sandbox": {"adaptive": True}}),
        ({"sandbox": {"adaptive": False, "max_boxes": 12}}, {"sandbox": {"max_boxes": 12}}),
        ({"grading": {"admission": "required"}}, {}),
        ({"grading": {"admission": "ignored"}}, {"grading": {"admission": "ignored"}}),
    ):
        digest = sha256(orjson.dumps(plain | stored, option=orjson.OPT_SORT_KEYS)).hexdigest()
        assert digest in known_digests(RunConfig.model_validate(plain | changes)), changes
    mine = RunConfig.model_validate(plain)
    assert config_digest(mine) in known_digests(mine)


def test_a_run_is_the_same_on_other_machines(path: Path) -> None:
    """Engines may be added while it goes on."""
    first, second = load_config(path, [], {}), load_config(path, ["engines=3", "training.gpus={local: [1]}"], {})
    assert config_digest(first) == config_digest(second) and second.training.gpus == {"local": [1]}


def test_keys_of_another_version_do_not_lose_a_run(path: Path) -> None:
    config = load_config(path, [], {})
    stored = config.model_dump(mode="json")
    stored["training"]["of_a_later_version"] = stored["of_a_later_version"] = {"a": 1}
    stored["datasets"][0]["of_a_later_version"] = 1
    del stored["limits"]["stall_seconds"]  # a key that a later version has added
    assert read_stored_config(stored) == config and config_digest(read_stored_config(stored)) == config_digest(config)


@pytest.mark.parametrize("name", ["quickstart", "quickstart_long"])
def test_the_shipped_config_is_valid(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml", [], {})
    assert config.model == "tiny"
    assert {dataset.use for dataset in config.datasets} == {"train", "eval"}


def test_temporal_settings_fill_in_the_runs_limits(tmp_path: Path) -> None:
    settings = load_temporal_settings()
    stages = settings.all_stages(workspace_seconds=100, eval_seconds=200)
    assert (stages["workspace"].start_to_close_seconds, stages["grade"].start_to_close_seconds) == (160, 420)
    assert {stage.queue for stage in stages.values()} <= set(QUEUES)
    assert stages["boot"].max_tries == 0 and stages["grade"].max_tries == 1


def test_temporal_settings_refuse_unknown_keys(tmp_path: Path) -> None:
    text = (ROOT / "temporal.yaml").read_text()
    wrong = tmp_path / "temporal.yaml"
    wrong.write_text(text + "\nsurprise: 1\n")
    with pytest.raises(ConfigError, match="surprise: there is no such key"):
        load_temporal_settings(wrong)


def test_an_endpoint_only_evaluates(path: Path) -> None:
    endpoint = ["endpoint.url=https://api.example.org/v1", "endpoint.model=m"]
    with pytest.raises(ConfigError, match="nothing can be trained"):
        load_config(path, endpoint, {})
    config = load_config(path, [*endpoint, "training.steps=0", "endpoint.key='${SOME_KEY}'"], {})
    assert config.endpoint is not None and config.endpoint.key == "${SOME_KEY}"
    with pytest.raises(ConfigError, match="nothing can be trained"):
        with_values(config.model_dump(mode="json"), {"training.steps": 1})  # as `ratchet set --add-steps` does
    with pytest.raises(ConfigError, match=r"endpoint\.key: configs are stored") as refused:
        load_config(path, [*endpoint, "training.steps=0", "endpoint.key=sk-literal"], {})
    assert "sk-literal" not in str(refused.value)


def _integers(model: type[BaseModel], path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of single whole numbers in a config; 0 is the first element of a list."""
    for name, field in model.model_fields.items():
        within = (0,) if get_origin(field.annotation) in (list, tuple) else ()
        kinds = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type)]
        for kind in kinds:
            if issubclass(kind, BaseModel):
                yield from _integers(kind, (*path, name, *within))
        annotated = [get_args(one)[0] for one in get_args(field.annotation) if get_origin(one) is Annotated]
        if int in kinds or int in annotated:
            yield (*path, name, *within)


@pytest.mark.parametrize("place", list(_integers(RunConfig)), ids=str)
def test_every_number_fits_into_the_column_that_it_may_reach(path: Path, place: tuple[str | int, ...]) -> None:
    """64 bits for the seed, 32 for all others."""
    values = load_config(path, ["training.lora={}", "engine.stop_token_ids=[1]"]).model_dump(mode="json")
    *parents, leaf = place
    section: Any = values
    for part in parents:
        section = section[part]
    section[leaf] = 2**63 if place == ("seed",) else 2**31
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(values)
    assert place in [one["loc"] for one in refused.value.errors()]
