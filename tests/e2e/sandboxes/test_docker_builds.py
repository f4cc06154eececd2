"""Tasks in Harbor's format that come with a Dockerfile: built once by a workflow, for containers and local boxes."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.built_images import build_workflow_id
from ratchet.errors import BuildFailedError
from ratchet.temporal_client import WorkflowState, workflow_states
from sandbox_gateway.image_store import ROOTFS, ImageStore, read_facts
from sandboxes.build_context import pack_build_context
from sandboxes.image_builders import LocalImageBuilder
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import call, finish

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
BUILD = "RUN sleep 3 && echo built > b.txt"


def write_task(directory: Path, build: str) -> Path:
    """Write one task whose image has a.txt of the context and what `build` makes; return the directory."""
    for name in ("environment", "tests"):
        (directory / name).mkdir(parents=True)
    (directory / "instruction.md").write_text("make it right")
    (directory / "environment" / "Dockerfile").write_text(
        f"FROM host:latest\nWORKDIR /srv/app\nCOPY start.txt a.txt\n{build}\n"
    )
    (directory / "environment" / "start.txt").write_text("one\n")
    (directory / "tests" / "test.sh").write_text(
        'test "$(cat a.txt) $(cat b.txt)" = "two built" && reward=1 || reward=0\n'
        "echo $reward > /logs/verifier/reward.txt\n"
    )
    return directory


def image_of(task: Path) -> str:
    return pack_build_context(task / "environment").image


async def num_builds(loop: Loop, image: str) -> int:
    query = f"WorkflowType = 'BuildImage' AND WorkflowId = '{build_workflow_id(image)}'"
    return len([one async for one in loop.client.list_workflows(query)])


def build_images(loop: Loop, dataset: Path) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "cli.main", "tasks", "images", "build", str(dataset), "--json"]
    done = subprocess.run(command, env=loop.environment, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else [{"failure": done.stderr}]


async def test_rollouts_wait_for_one_build_of_their_image(loop: Loop, tmp_path: Path) -> None:
    task = write_task(tmp_path / "one", BUILD)
    await loop.script(*[call("echo two > a.txt"), "Done."] * 3)
    handles = [await loop.start(str(task)) for _ in range(3)]
    rows = [(await finish(loop, handle))[1] for handle in handles]
    assert [row.outcome for row in rows] == ["graded"] * 3, [row.outcome_reason for row in rows]
    (workflow_id,) = {build_workflow_id(image_of(task))}
    assert await workflow_states(loop.client, [workflow_id]) == {workflow_id: WorkflowState.COMPLETED}
    assert await num_builds(loop, image_of(task)) == 1
    await loop.forget_script()  # three agents share the answers, so one may have ended early


async def test_a_dockerfile_that_fails_is_named_with_what_it_printed(loop: Loop, tmp_path: Path) -> None:
    task = write_task(tmp_path / "two", "RUN echo 'the mirror has no shop 2.1' >&2 && exit 7")
    _, row = await finish(loop, await loop.start(str(task)))
    assert row.outcome == "infra_failed" and row.reward is None
    assert "cannot be built" in row.outcome_reason and "the mirror has no shop 2.1" in row.outcome_reason
    status, (built,) = build_images(loop, tmp_path)
    assert status == 1 and "the mirror has no shop 2.1" in built["failure"]
    assert await num_builds(loop, image_of(task)) == 2  # a person has asked for it again


async def test_images_are_built_before_a_run_needs_them(loop: Loop, tmp_path: Path) -> None:
    one, two = (write_task(tmp_path / name, "RUN echo built > b.txt") for name in ("one", "two"))
    assert image_of(one) == image_of(two)
    status, (built,) = build_images(loop, tmp_path)
    assert (status, built["failure"], built["tasks"]) == (0, "", ["one", "two"])
    await loop.script(call("echo two > a.txt"), "Done.")
    _, row = await finish(loop, await loop.start(str(one)))
    assert (row.outcome, row.reward) == ("graded", 1.0), row.outcome_reason
    assert await num_builds(loop, image_of(one)) == 1


async def test_an_image_for_local_boxes_is_built_and_imported(
    docker_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{docker_directory}/docker.sock")
    images = tmp_path / "images"
    lines: list[str] = []
    good = pack_build_context(write_task(tmp_path / "good", "RUN echo built > b.txt") / "environment")
    builder = LocalImageBuilder(images)
    for _ in range(2):  # the second time it is there
        await builder.build(good.image, base64.b64decode(good.archive), lines.append)
    directory = ImageStore(images).find(good.image)
    assert directory is not None and read_facts(directory).workdir == "/srv/app"
    assert (directory / ROOTFS / "srv/app/b.txt").read_text() == "built\n"
    bad = pack_build_context(write_task(tmp_path / "bad", "RUN echo no luck && exit 3") / "environment")
    with pytest.raises(BuildFailedError):
        await builder.build(bad.image, base64.b64decode(bad.archive), lines.append)
    assert any("no luck" in line for line in lines) and ImageStore(images).find(bad.image) is None
    assert not [name for name in os.listdir("/tmp") if name.startswith("ratchet-build-")]
