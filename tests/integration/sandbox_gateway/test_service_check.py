"""The check of a service, also as a command: each fault is one line that names it, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from activities.sandbox_probe import SandboxProbe
from sandboxes.e2b import E2BProvider
from tests.integration.sandbox_gateway.conftest import API_KEY, CHECKOUT, GatewayProcess
from tests.standins import faulty_service
from tests.standins.faulty_service import serving_with_fault

FOUND = {
    faulty_service.NO_METADATA: {"metadata", "listing"},
    faulty_service.SHORT_LIFE: {"time to live"},
    faulty_service.NO_LIST: {"listing"},
    faulty_service.NO_KEYS: {"one box for one key, and its end"},
    faulty_service.ALL_ENDED: {"one box for one key, and its end"},
    faulty_service.CHANGED_FILES: {"a file of 5 MiB both ways"},
    faulty_service.SHORT_OUTPUT: {"3 MiB of output"},
    faulty_service.OPEN_BOXES: {"network of a grading box"},
}


@pytest.mark.parametrize("fault", FOUND)
async def test_a_fault_is_found(fault: str, gateway: GatewayProcess, adapter_address: str) -> None:
    with serving_with_fault(gateway.url, fault) as url:
        probe = SandboxProbe(E2BProvider(API_KEY, url, url), f"http://{adapter_address}")
        found = [one async for one in probe.findings("host", 3600, 0, more=True)]
    assert {one.capability for one in found if one.problem} == FOUND[fault], found
    assert gateway.call("GET", "/v2/sandboxes").json() == [], "its boxes are ended"


def check(url: str, home: Path, adapter_port: int) -> "subprocess.CompletedProcess[str]":
    variables = {"E2B_API_KEY": API_KEY, "RATCHET_SANDBOX_MAX_TTL_SECONDS": "3600"}
    variables |= {"ADAPTER_PUBLIC_HOST": "127.0.0.1", "ADAPTER_PORT": str(adapter_port)}
    command = [sys.executable, "-m", "cli.main", "admin", "sandboxes", "check", url, "--json"]
    environment = os.environ | variables | {"RATCHET_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT, env=environment)


def test_a_service_that_has_all(gateway: GatewayProcess, adapter_port: int, tmp_path: Path) -> None:
    said = check(gateway.url, tmp_path, adapter_port)
    rows = orjson.loads(said.stdout)
    assert said.returncode == 0 and not any(row["missing"] for row in rows), said
    assert len({row["capability"] for row in rows}) == 12 and all(row["measured"].endswith(" s") for row in rows)


def test_a_service_that_is_away(tmp_path: Path) -> None:
    said = check("http://127.0.0.1:9", tmp_path, 9)
    assert said.returncode == 1 and "127.0.0.1:9" in orjson.loads(said.stdout)[0]["missing"]
