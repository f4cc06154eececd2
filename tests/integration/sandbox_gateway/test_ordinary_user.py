"""A user other than root is refused before anything is started, with the reason and the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.sandbox_gateway.conftest import CHECKOUT

_NOBODY = 65_534
_PROGRAM = """
import os, sys
from pathlib import Path
from cli import main
from sandbox_gateway import image_store, images, machine_probe, serve, settings  # before the checkout is out of reach
os.setgroups([]); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})
try:
    {call}
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


def as_nobody(call: str) -> str:
    program = _PROGRAM.format(user=_NOBODY, call=call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=CHECKOUT)
    return done.stdout + done.stderr.strip().rpartition("\n")[2]


def test_the_gateway_says_why_it_does_not_start(tmp_path: Path) -> None:
    root = tmp_path / "gateway"
    said = as_nobody(f"serve.serve_gateway(settings.GatewaySettings(root_directory=Path('{root}'), api_key='x'))")
    assert said.startswith(
        "MachineError: Local sandboxes cannot run here: the gateway runs as uid 65534 and only root may map"
    )
    assert "start it with sudo" in said and not root.exists()


def test_doctor_names_every_protection_with_its_reason() -> None:
    said = as_nobody("[print(found.name, found.on, found.reason, sep='|') for found in machine_probe.probe_machine()]")
    rows = {line.split("|")[0]: line.split("|")[1:] for line in said.splitlines() if line}
    assert {
        "bubblewrap",
        "own user range per box",
        "user namespaces",
        "memory and process limits",
        "disk limit",
    } <= set(rows)
    assert rows["own user range per box"][0] == "False"
    assert all(reason for _on, reason in rows.values())


def test_an_import_says_that_it_needs_root(tmp_path: Path) -> None:
    said = as_nobody(f"image_store.ImageStore(Path('{tmp_path}')).add(Path('/etc'), 'x', print)")
    assert (
        said
        == "MachineError: images keep their files' owners, which only root may set; run `ratchet tasks images import` "
        "as root"
    )
