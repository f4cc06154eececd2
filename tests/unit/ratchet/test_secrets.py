"""Values of secrets stay outside of configs, and are found where the worker runs."""

import json
from pathlib import Path

import pytest
from temporalio.api.failure.v1 import Failure
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.stage import activity_stage
from ratchet import secrets
from ratchet.config_sources import load_config, resolve_config
from ratchet.errors import CommandFailedError, ConfigError
from ratchet.vime_names import EXTRA_ENVS_VARIABLE

PLANTED = "planted-5b1c"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    monkeypatch.setattr(secrets, "_used", set())
    for name in ("KEY", EXTRA_ENVS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("value", [PLANTED, "", "$KEY", "${KEY}x", "${1KEY}", "${}"])
def test_a_value_in_a_config_is_refused_and_not_repeated(value: str, home: Path) -> None:
    (home / "tasks.jsonl").write_text("")
    values = {"datasets": [{"path": str(home / "tasks.jsonl")}], "harness": {"extra_env": {"KEY": value}}}
    with pytest.raises(ConfigError, match=r"run.yaml: harness.extra_env.KEY: .* write \$\{KEY\} here") as refused:
        resolve_config(values, "run.yaml", home)
    assert PLANTED not in str(refused.value)


def test_the_file_comes_before_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = {"OTHER": "${KEY}"}
    monkeypatch.setenv("KEY", "third")
    assert secrets.resolve_references("harness.extra_env", reference) == {"OTHER": "third"}
    monkeypatch.setenv(EXTRA_ENVS_VARIABLE, "{KEY: second}")
    assert secrets.resolve_references("harness.extra_env", reference) == {"OTHER": "second"}
    (home / "secrets.env").write_text("# a comment with KEY=no\n\nKEY = first=1 \n")
    assert secrets.resolve_references("harness.extra_env", reference) == {"OTHER": "first=1"}


def test_a_name_without_a_value_is_named_with_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"harness.extra_env.A: \$\{KEY\} has no value; write KEY=… into .*secrets.env"
    ):
        secrets.resolve_references("harness.extra_env", {"A": "${KEY}"})


def test_references_are_resolved_in_lists_and_mappings(home: Path) -> None:
    (home / "secrets.env").write_text(f"KEY={PLANTED}\n")
    options = {"uri": "http://me:${KEY}@host", "settings": {"key": "${KEY}", "number": 1}, "tags": ["${KEY}", "a"]}
    found = secrets.resolve_references("metrics.sinks", options)
    assert found == {
        "uri": f"http://me:{PLANTED}@host", "settings": {"key": PLANTED, "number": 1}, "tags": [PLANTED, "a"]
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"metrics.sinks.settings.key: \$\{NONE\} has no value"):
        secrets.resolve_references("metrics.sinks", {"settings": {"key": "${NONE}"}})


def test_the_config_of_an_older_run_keeps_its_value() -> None:
    assert secrets.resolve_references("harness.extra_env", {"A": "plain"}) == {"A": "plain"}
    assert secrets.redact_config({"harness": {"extra_env": {"A": "plain", "B": "${B}"}}}) == {
        "harness": {"extra_env": {"A": "***", "B": "${B}"}}
    }


def test_the_variable_of_claude_code_becomes_references(home: Path) -> None:
    (home / "tasks.jsonl").write_text("")
    path = home / "run.yaml"
    path.write_text(f"datasets: [{{path: {home}/tasks.jsonl}}]\nharness: {{name: claude_code}}\n")
    environment = {EXTRA_ENVS_VARIABLE: json.dumps({"KEY": PLANTED, "N": 1})}
    config = load_config(path, environment=environment)
    assert config.harness.extra_env == {"KEY": "${KEY}", "N": "${N}"}
    assert PLANTED not in config.model_dump_json()


def test_messages_lose_what_was_looked_up(home: Path) -> None:
    (home / "secrets.env").write_text(f"KEY={PLANTED}\nN=1\n")
    secrets.resolve_references("harness.extra_env", {"KEY": "${KEY}", "N": "${N}"})
    assert secrets.without_secrets(f"1: curl -H {PLANTED} failed") == "1: curl -H *** failed"


async def test_an_activitys_failure_holds_the_value_nowhere(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Temporal stores an error with its causes and their stack traces."""
    (home / "secrets.env").write_text(f"KEY={PLANTED}\n")
    secrets.note_values({"KEY": "${KEY}", "OTHER": "${NOT_SET}"})

    class Stages:
        @activity_stage("fails")
        async def fails(self, kind: str) -> None:
            if kind == "bug":
                raise ValueError(f"--token {PLANTED}")
            raise CommandFailedError(f"curl {PLANTED}", 7, "", PLANTED)

    for kind in ("bug", "command"):
        with pytest.raises(ApplicationError) as failed:
            await ActivityEnvironment().run(Stages().fails, kind)
        failure = Failure()
        await DataConverter.default.encode_failure(failed.value, failure)
        assert "***" in str(failure) and PLANTED not in str(failure)
    assert PLANTED not in capsys.readouterr().out


def test_a_malformed_variable_is_not_repeated(home: Path) -> None:
    path = home / "run.yaml"
    path.write_text("harness: {name: claude_code}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path, environment={EXTRA_ENVS_VARIABLE: f"{{{PLANTED}: ["})
    assert PLANTED not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("git clone https://anna:s3cret@host/x.git", "git clone https://anna@host/x.git"),
        ("postgresql://:s3cret@db/x", "postgresql://@db/x"),
        ("curl -H 'Authorization: Bearer abc.def'", "curl -H 'Authorization: Bearer ***'"),
        ("http://127.0.0.1:8000/x,user@host", "http://127.0.0.1:8000/x,user@host"),
        ("a" * 100_000, "a" * 100_000),
    ],
    ids=["url", "no user", "bearer", "a port", "a long word"],
)
def test_passwords_of_urls_and_bearer_tokens_are_left_out(text: str, shown: str) -> None:
    assert secrets.without_secrets(text) == shown
