"""Harbor's task.toml of each published version: what a task needs, what is refused, all tasks in one list."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from activities.dataset_import import offered_rows, offers_of, unmet_needs
from activities.datasets.archives import read_packed
from activities.datasets.base import Problem
from activities.datasets.formats import check_rows, read_rows
from activities.datasets.harbor import _command
from activities.datasets.lints import describe_rows
from ratchet.config import DatasetConfig
from ratchet.config_sources import load_config
from ratchet.errors import DatasetError

INSTALLS = "apt-get update\ncurl -LsSf https://example.invalid/install.sh | sh\nuvx pytest /tests\n"


def task(root: Path, name: str = "one", *, toml: str = "", script: str = "pytest /tests\n", **files: str) -> Path:
    """Write a task directory. `files`: further ones by name, with `__` for a slash."""
    directory = root / name
    written = {"instruction.md": "do it\n", "tests/test.sh": script}
    if "docker_image" not in toml:
        written["environment/Dockerfile"] = "FROM python:3.12\nWORKDIR /code\n"
    written |= {key.replace("__", "/").replace("_dot_", "."): text for key, text in files.items()}
    for path, text in {**written, "task.toml": toml}.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return root


def spec_of(root: Path) -> dict[str, Any]:
    (row,) = read_rows(DatasetConfig(path=str(root)), "")
    return row["spec"]


FIRST = """version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 120.0
[agent]
timeout_sec = 300.0
[environment]
build_timeout_sec = 600.0
cpus = 2
memory = "4G"
storage = "10G"
allow_internet = false
"""
LATEST = """schema_version = "1.4"
artifacts = ["/logs/agent/out.txt"]
[task]
name = "org/one"
[verifier]
timeout_sec = 900.0
env = { MODE = "strict one" }
[agent]
timeout_sec = 900.0
user = "dev"
[environment]
network_mode = "public"
cpus = 1.5
memory_mb = 2048
gpus = 0
os = "Linux"
env = { LEVEL = "3" }
[solution]
env = { FAST = "1" }
"""
LIMITS = {"limits.eval_seconds": 120.0, "limits.agent_seconds": 300.0, "sandbox.cpus": 2, "sandbox.memory_mib": 4096}


@pytest.mark.parametrize(
    ("toml", "script", "needs"),
    [
        ("", "pytest /tests\n", {}),
        ("", INSTALLS, {"sandbox.network": ["grade"]}),
        (FIRST, INSTALLS, LIMITS),
        (
            LATEST,
            "pytest /tests\n",
            {
                "limits.eval_seconds": 900.0,
                "limits.agent_seconds": 900.0,
                "sandbox.cpus": 1.5,
                "sandbox.memory_mib": 2048,
            },
        ),
        ("[environment]\nallow_internet = true\n", INSTALLS, {"sandbox.network": ["grade"]}),
        ("[environment]\nallow_internet = true\n", "true\n", {}),
        ('[environment]\nnetwork_mode = "public"\n[agent]\nnetwork_mode = "no-network"\n', "true\n", {}),
        ('[agent]\nnetwork_mode = "allowlist"\n', "true\n", {"sandbox.network": ["agent"]}),
        ('[environment]\nmemory = "2Gi"\n', "true\n", {"sandbox.memory_mib": 2048}),
        ('[environment]\nmemory = "2 GB"\n', "true\n", {"sandbox.memory_mib": 2048}),
        ('[environment]\nmemory = "1.5g"\n', "true\n", {"sandbox.memory_mib": 1536}),
        ('[verifier]\nnetwork_mode = "public"\n', "pytest /tests\n", {"sandbox.network": ["grade"]}),
        ('[verifier]\nnetwork_mode = "no-network"\n', INSTALLS, {}),
        ('[environment]\nnetwork_mode = "no-network"\nmemory = "512M"\n', INSTALLS, {"sandbox.memory_mib": 512}),
    ],
)
def test_needs(tmp_path: Path, toml: str, script: str, needs: dict[str, Any]) -> None:
    assert spec_of(task(tmp_path, toml=toml, script=script))["needed_settings"] == needs


_NETWORK = {"sandbox.network": ["grade"]}


@pytest.mark.parametrize(
    ("script", "needs"),
    [
        *((line, _NETWORK) for line in ("apk add --no-cache bash", "apt-get -y install jq", "dnf install -y gcc")),
        *((line, _NETWORK) for line in ("yarn install", "pnpm add x", "bundle install", "conda install x", "npm ci")),
        *(
            (line, _NETWORK)
            for line in ("poetry install", "python -m pip install x", "go mod download", "pip3 install x")
        ),
        *((line, {}) for line in ("npm test", "go test ./...", "cargo test --offline", "make install", "yarn test")),
        *(
            (line, {})
            for line in ("# curl is not used", "pip install --no-index x", "npm ci --offline", "./install add")
        ),
        ("bash /tests/prepare.sh", _NETWORK),
        ("curl -LsSf https://x.test/uv.sh | sh && uv run --offline pytest", _NETWORK),
        ("apt-get update && apt-get install -y git && pip install --no-index -f /wheels x", _NETWORK),
        ("apt-get -o Acquire::Retries=3 update", _NETWORK),
    ],
)
def test_tests_that_install_need_the_network(tmp_path: Path, script: str, needs: dict[str, Any]) -> None:
    """Also by another script of theirs."""
    helper = {"tests__prepare_dot_sh": "uv sync\n"} if "prepare" in script else {}
    assert spec_of(task(tmp_path, script=f"{script}\npytest /tests\n", **helper))["needed_settings"] == needs


def test_users_variables_and_the_solution(tmp_path: Path) -> None:
    spec = spec_of(task(tmp_path, toml=LATEST, solution__solve_dot_sh="touch x\n", solution__help_dot_py="1\n"))
    assert spec["eval_cmd"] == "env LEVEL=3 MODE='strict one' bash -c /tests/test.sh" and spec["agent_user"] == "dev"
    assert spec["solution_cmd"] == "env LEVEL=3 FAST=1 bash -c 'bash /solution/solve.sh'" and spec["solution_archive"]
    assert spec["agent_environment"] == {"LEVEL": "3"} and spec["pre_commands"] == []


@pytest.mark.parametrize("mark", ["<!-- harbor-canary GUID 1 -->\n", "# CANARY 1\n# canary 2\n\n"])
def test_canaries_are_not_shown_to_the_agent(tmp_path: Path, mark: str) -> None:
    root = task(tmp_path)
    (root / "one" / "instruction.md").write_text(mark + "\n# Title\ndo it\n")
    assert spec_of(root)["problem_statement"] == "# Title\ndo it\n"


@pytest.mark.parametrize(
    ("toml", "field", "message"),
    [
        ('[environment]\nos = "windows"\n', "environment.os", "Linux"),
        ("[environment]\ngpus = 1\n", "environment.gpus", "GPUs"),
        ('[environment]\ntpu = { type = "v6e", topology = "2x4" }\n', "environment.tpu", "TPUs"),
        ('[[environment.mcp_servers]]\nname = "a"\nurl = "http://a"\n', "environment.mcp_servers", "MCP"),
        ('[environment.healthcheck]\ncommand = "true"\n', "environment.healthcheck", "healthy"),
        ('[verifier]\nenvironment_mode = "separate"\n', "verifier.environment_mode", "image of its own"),
        ('[verifier.environment]\ndocker_image = "x"\n', "verifier.environment", "image of its own"),
        ('[[verifier.collect]]\ncommand = "true"\n', "verifier.collect", "between agent and verifier"),
        ('[[steps]]\nname = "a"\n', "steps", "several steps"),
        ('[verifier]\nenv = { KEY = "${OPENAI_API_KEY}" }\n', "verifier.env.KEY", "no variables of this host"),
        ('[agent]\ntimeout_sec = "long"\n', "agent.timeout_sec", "'long'"),
        ("[agent]\ntimeout_sec = true\n", "agent.timeout_sec", "expected a number above 0, found True"),
        ("[verifier]\ntimeout_sec = nan\n", "verifier.timeout_sec", "found nan"),
        ("[environment]\ncpus = inf\n", "environment.cpus", "found inf"),
        ("[environment]\nmemory = 2048\n", "environment.memory", "expected a size such as '2G', found 2048"),
        ('[environment]\nmemory = "lots"\n', "environment.memory", "'lots'"),
        ('[environment]\nmemory = "0G"\n', "environment.memory_mb", "above 0"),
        ('[environment]\nnetwork_mode = "weird"\n', "environment.network_mode", "no-network, public, allowlist, found"),
        ('[agent]\nnetwork_mode = ["public"]\n', "agent.network_mode", "['public']"),
        ("[verifier]\nnetwork_mode = false\n", "verifier.network_mode", "found False"),
        ('[environment]\nallow_internet = "no"\n', "environment.allow_internet", "one of true, false, found 'no'"),
        ('[verifier]\nenvironment_mode = "weird"\n', "verifier.environment_mode", "shared, separate, found 'weird'"),
        ('[agent]\n[environment]\nenv = { PATH = "/v/bin:$PATH" }\n', "environment.env.PATH", "write the value"),
        ('[environment]\nenv = { "X;touch /p" = "1" }\n', "environment.env.X;touch /p", "letters, digits and _"),
        ('[verifier]\nenv = { "1A" = "1" }\n', "verifier.env.1A", "'1A'"),
        ('[environment]\nenv = { RATCHET_SESSION_TOKEN = "1" }\n', "environment.env.RATCHET_SESSION_TOKEN", "RATCHET_"),
        ("[verifier]\nenv = { A = true }\n", "verifier.env.A", "expected a string or a number, found True"),
        ("[verifier]\nenv = { A = [1] }\n", "verifier.env.A", "found [1]"),
        ("[verifier]\nenv = 1\n", "verifier.env", "int"),
        ("environment = 1\n", "environment", "int"),
        ("x = [", "", "is not TOML"),
    ],
)
def test_what_no_box_provides_is_refused(tmp_path: Path, toml: str, field: str, message: str) -> None:
    (problem,) = check_rows(DatasetConfig(path=str(task(tmp_path, toml=toml))))
    assert isinstance(problem, Problem), problem
    assert problem.field == field and message in problem.message and problem.file.endswith("one/task.toml")


@pytest.mark.parametrize("linked", ["solution/credentials", "tests/data", "instruction.md"])
def test_a_link_that_leaves_the_task_is_refused(tmp_path: Path, linked: str) -> None:
    (tmp_path / "secret").write_text("key\n")
    root = task(tmp_path / "tasks", solution__solve_dot_sh="touch x\n")
    (root / "one" / linked).unlink(missing_ok=True)
    (root / "one" / linked).symlink_to(tmp_path / "secret")
    (problem,) = check_rows(DatasetConfig(path=str(root)))
    assert isinstance(problem, Problem), problem
    assert problem.file.endswith(f"one/{linked}") and "a link that leads out of the task" in problem.message


def test_a_link_within_the_task_is_its_file(tmp_path: Path) -> None:
    root = task(tmp_path, solution__solve_dot_sh="touch x\n")
    (root / "one" / "solution" / "same.sh").symlink_to("solve.sh")
    assert read_packed(spec_of(root)["solution_archive"], "solution/same.sh") == "touch x\n"


def test_an_instruction_that_is_a_directory_is_named(tmp_path: Path) -> None:
    root = task(tmp_path)
    (root / "one" / "instruction.md").unlink()
    (root / "one" / "instruction.md").mkdir()
    (problem,) = check_rows(DatasetConfig(path=str(root)))
    assert isinstance(problem, Problem) and problem.file.endswith("instruction.md") and "directory" in problem.message


def test_a_script_without_a_shebang_is_run_by_bash(tmp_path: Path) -> None:
    script = tmp_path / "test.sh"
    script.write_text('[[ $A == "1 b" ]] && echo "${BASH_VERSION:+bash}"\n')
    script.chmod(0o755)
    command = _command(str(script), {"environment": {"env": {"A": "1 b"}}, "verifier": {}}, "verifier")
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout == "bash\n"


def test_all_tasks_are_named_in_one_list(tmp_path: Path) -> None:
    for number, toml in enumerate(["[environment]\ngpus = 2\n", "", '[environment]\ntpu = "v6e"\n']):
        task(tmp_path, f"t{number}", toml=toml)
    task(tmp_path, "composed", toml='[environment]\ndocker_image = "x"\n', environment__compose_dot_yaml="services: {}")
    (tmp_path / "stepped" / "steps").mkdir(parents=True)
    (tmp_path / "stepped" / "task.toml").write_text('[[steps]]\nname = "a"\n')
    found = list(check_rows(DatasetConfig(path=str(tmp_path))))
    assert sum(isinstance(one, Problem) for one in found) == 4
    with pytest.raises(Exception, match=r"(?s)compose\.yaml.*several steps.*GPUs.*TPUs"):
        list(read_rows(DatasetConfig(path=str(tmp_path)), ""))


def test_needs_are_compared_with_the_settings_of_a_run() -> None:
    offers = offers_of(load_config(Path(__file__).parents[4] / "configs/quickstart.yaml", []))
    assert unmet_needs({"limits.eval_seconds": 1, "sandbox.memory_mib": 8192}, offers) == []
    assert unmet_needs({"limits.eval_seconds": 1e6}, offers) == [
        f"limits.eval_seconds of 1000000.0, found {offers['limits.eval_seconds']}"
    ]
    assert unmet_needs({"sandbox.network": ["grade"]}, offers) == ["sandbox.network of ['grade'], found []"]
    assert unmet_needs({"sandbox.network": ["grade"]}, {"sandbox.network": ["agent", "grade"]}) == []


@pytest.mark.parametrize(
    ("user", "tests_user", "needed"),
    [
        ('"root"', None, "root"),
        ("0", None, "root"),
        ('"0"', None, "root"),
        ('"tester"', "tester", None),
        ('"agent"', "agent", None),
        ('"_apt"', "_apt", None),
    ],
)
def test_the_verifiers_user(tmp_path: Path, user: str, tests_user: str | None, needed: str | None) -> None:
    spec = spec_of(task(tmp_path, toml=f"[verifier]\nuser = {user}\n"))
    assert (spec.get("tests_user"), spec["needed_settings"].get("grading.user")) == (tests_user, needed)


@pytest.mark.parametrize("user", ['"1000"', "1000", '"tester:staff"', '""', '"a b"', "true"])
def test_a_verifiers_user_that_is_no_name_is_refused(tmp_path: Path, user: str) -> None:
    (problem,) = check_rows(DatasetConfig(path=str(task(tmp_path, toml=f"[verifier]\nuser = {user}\n"))))
    assert isinstance(problem, Problem) and problem.field == "metadata.tests_user"
    assert "expected the name of a user other than root, found " in problem.message


def test_root_is_a_permission_of_the_run_and_all_tasks_that_need_it_are_named(tmp_path: Path) -> None:
    for number, user in enumerate(["root", "tester", "root", 0]):
        task(tmp_path, f"t{number}", toml=f"[verifier]\nuser = {user!r}\n")
    dataset = DatasetConfig(path=str(tmp_path))
    for offered in ("agent", "tester", "zoe"):
        with pytest.raises(DatasetError, match=rf"grading.user of root, found {offered}: 3 tasks: t0, t2, t3"):
            list(offered_rows(dataset, "", {"grading.user": offered}))
    assert len(list(offered_rows(dataset, "", {"grading.user": "root"}))) == 4


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("", "as grading.user (by default unprivileged, whereas Harbor's default is root)"),
        ('[verifier]\nuser = "tester"\n', "its reward file, as tester;"),
        ('[verifier]\nuser = "root"\n', "its reward file, as root;"),
        ('[verifier]\nuser = "root"\n', "need grading.user of root"),
        ('[agent]\nuser = "dev"\n', "have the agent work as dev"),
        ('[verifier]\nnetwork_mode = "public"\n', "need sandbox.network of ['grade']"),
        ('[environment]\nnetwork_mode = "public"\n', "permit this network: public; a run opens it by sandbox.network"),
        ("[environment]\nallow_internet = true\n", "permit this network: public; a run opens it by sandbox.network"),
        ("[environment]\nallow_internet = false\n", "permit this network: no-network;"),
    ],
)
def test_users_and_networks_are_told(tmp_path: Path, toml: str, told: str) -> None:
    rows = describe_rows(read_rows(DatasetConfig(path=str(task(tmp_path, toml=toml))), ""), "d")
    assert any(told in row for row in rows), rows


def test_what_was_understood_is_told(tmp_path: Path) -> None:
    root = task(tmp_path, toml=FIRST, script=INSTALLS, solution__solve_dot_sh="touch x\n")
    told = "\n".join(describe_rows(read_rows(DatasetConfig(path=str(root)), ""), "d"))
    for part in (
        "environment/Dockerfile",
        "/code",
        "reward file",
        "unprivileged",
        "solve.sh",
        "limits.eval_seconds of 120",
    ):
        assert part in told


def test_all_tasks_whose_image_has_to_be_built_are_told_with_the_command(tmp_path: Path) -> None:
    root = tmp_path / "my tasks"
    for name in ("one", "two", "three"):
        task(root, name, toml='[environment]\ndocker_image = "host"\n' if name == "two" else "")
    told = describe_rows(read_rows(DatasetConfig(path=str(root)), ""), str(root))
    (built,) = [line for line in told if "environment/Dockerfile" in line]
    assert built.startswith("2 rows") and f"`ratchet tasks images build '{root}'`: one, three" in built
