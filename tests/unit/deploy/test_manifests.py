"""The compose file and the Helm chart start parts with the commands and variables that these parts understand.

The chart is rendered by helm; skipped without it.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.process import EngineSettings, vllm_command, vllm_environment
from ratchet.config_engines import PlacedEnginesConfig
from ratchet.errors import RatchetError, UserError
from stack.parts import Stack

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_compose_gives_the_stack_its_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, value in services["ratchet"]["environment"].items():
        monkeypatch.setenv(name, value)
    names = {part.name for part in Stack(tmp_path).parts()}
    assert not names & {"postgres", "temporal", "temporal-ui"}
    assert {"gateway", "ray", "engine", "adapter", "learner", "worker"} <= names
    assert set(services["ratchet"]["depends_on"]) == {"postgres", "temporal"} == set(services) - {"ratchet"}


@pytest.fixture
def chart() -> list[dict[str, Any]]:
    if (program := shutil.which("helm")) is None:
        pytest.skip("there is no helm here")
    values = ["adapterPublicHost=https://adapter.example.com", "engines.replicas=2", "model=/models/x"]
    command = [program, "template", "mine", str(DEPLOY / "helm"), *(word for one in values for word in ("--set", one))]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [document for document in yaml.safe_load_all(rendered) if document]


def test_the_chart_makes_an_engine_for_each_address(chart: list[dict[str, Any]]) -> None:
    (settings,) = [one["data"]["run.yaml"] for one in chart if one["kind"] == "ConfigMap"]
    config = yaml.safe_load(settings)
    addresses = [PlacedEnginesConfig.model_validate(one).address for one in config["engines"]]
    (engines,) = [one for one in chart if one["kind"] == "StatefulSet"]
    name = engines["metadata"]["name"]
    assert config["model"] == "/models/x"
    assert addresses == [f"http://{name}-{at}.{engines['spec']['serviceName']}:8000" for at in (0, 1)]
    assert engines["spec"]["replicas"] == 2


def test_no_outage_fails_the_job_for_good() -> None:
    """Its pod is replaced unless it ended with the code of what a person must mend."""
    head = (DEPLOY / "helm" / "templates" / "head.yaml").read_text()
    assert re.findall(r"action: FailJob\n.*onExitCodes: .*values: \[(.*)\]", head) == [str(UserError.cli_exit_code)]
    _assert_outages_exit_otherwise(RatchetError)


def _assert_outages_exit_otherwise(error: type[RatchetError]) -> None:
    assert not (error.retryable and error.cli_exit_code == UserError.cli_exit_code), error
    for below in error.__subclasses__():
        _assert_outages_exit_otherwise(below)


def test_an_engine_of_the_chart_has_the_arguments_of_the_stack(chart: list[dict[str, Any]], tmp_path: Path) -> None:
    """Dtype and number of sequences are vLLM's own there, unless `engines.args` names them."""
    (engines,) = [one for one in chart if one["kind"] == "StatefulSet"]
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    settings = EngineSettings(
        model_path=tmp_path, port=8000, host="0.0.0.0", database_url="", state_dir=tmp_path, policies_root=tmp_path
    )
    ours = vllm_command(settings, Path("/models/x"))[1:]
    theirs = [word for part in container["command"][1:] for word in part.split("=", 1)]
    left = [word for word in ours if word not in theirs]
    assert left == ["--dtype", "auto", "--max-num-seqs", "64"]
    variables = {one["name"]: one["value"] for one in container["env"] if one["name"] != "RATCHET_HOME"}
    assert variables.items() <= vllm_environment(settings).items()
