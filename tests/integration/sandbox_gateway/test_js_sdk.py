"""The sandbox contract over E2B's SDK for JavaScript, the version below, from npm."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ratchet import paths
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess

_VERSION = "2.51.0"
_CONTRACT = Path(__file__).with_name("js_contract.mjs")
_INSTALL_SECONDS = 180
_CHECK_SECONDS = 240
CHECKS = ["commands", "users", "files", "background", "terminal", "life", "refusals"]


@pytest.fixture(scope="session")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the contract and the SDK, which is fetched once per machine."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node or npm is not on PATH")
    installed = paths.cache() / "tests" / f"e2b-js-{_VERSION}"
    if not installed.exists():
        fresh = tmp_path_factory.mktemp("npm")
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(fresh)]
        try:
            done = subprocess.run(
                [*command, f"e2b@{_VERSION}"], capture_output=True, text=True, check=False, timeout=_INSTALL_SECONDS
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm could not fetch e2b@{_VERSION} within {_INSTALL_SECONDS} s")
        if done.returncode != 0:
            pytest.skip(f"npm could not fetch e2b@{_VERSION}: {done.stderr.strip()[-300:]}")
        installed.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(fresh, installed, symlinks=True)
    directory = tmp_path_factory.mktemp("js")
    shutil.copy(_CONTRACT, directory)
    (directory / "node_modules").symlink_to(installed / "node_modules")
    return directory


def run_node(sdk: Path, gateway: GatewayProcess, argument: str) -> subprocess.CompletedProcess[str]:
    ours = {"E2B_API_KEY": API_KEY, "E2B_API_URL": gateway.url, "E2B_SANDBOX_URL": gateway.url, "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        ["node", "--preserve-symlinks", _CONTRACT.name, argument],
        cwd=sdk,
        env={**os.environ, **ours},
        capture_output=True,
        text=True,
        check=False,
        timeout=_CHECK_SECONDS,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_the_contract_in_javascript(sdk: Path, gateway: GatewayProcess, check: str) -> None:
    done = run_node(sdk, gateway, check)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_check_is_run(sdk: Path, gateway: GatewayProcess) -> None:
    assert run_node(sdk, gateway, "--list").stdout.split() == CHECKS
