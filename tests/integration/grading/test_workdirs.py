"""Workdirs that are not the repository's root, or that the image names by a link."""

import base64

import pytest

from grading import git_scripts
from sandboxes.base import Sandbox
from tests.integration.grading.test_history import GIT, MAKE

pytestmark = pytest.mark.timeout(300)


async def prepared(box: Sandbox, setup: str, workdir: str, *, grading: bool) -> None:
    await box.exec(f"{MAKE}\n{setup}", user="root")
    script = git_scripts.prepare_script(workdir, [], None if grading else "fix it", keep_history=grading)
    await box.exec(script, user="root")


@pytest.mark.parametrize(
    "setup, workdir",
    [
        ("make /workspace/mono", "/workspace/mono/pkg"),
        ("make /srv/mono && ln -s /srv/mono/pkg /workspace/r", "/workspace/r"),
        (f"make /srv/main && {GIT} worktree add -q /workspace/wt HEAD", "/workspace/wt/pkg"),
    ],
    ids=["directory", "link to a directory", "linked worktree"],
)
async def test_commands_of_a_monorepo_see_its_own_root(box: Sandbox, setup: str, workdir: str) -> None:
    """As in the image: names from the root by `:/`, from the workdir without it; nothing lands at another place."""
    await prepared(box, setup, workdir, grading=True)
    commands = ["git checkout -q gold -- b.txt", "git checkout -q gold -- :/a.txt"]
    script = git_scripts.apply_script(
        workdir, patch=False, test_patch=False, test_archive=False, test_commands=commands
    )
    await box.exec(script, user="root")
    read = f"cd {workdir} && cd $(pwd -P) && cat b.txt ../a.txt && ls"
    found = (await box.exec(read, user="root")).stdout.splitlines()
    assert found == ["the gold fix", "the gold fix", "b.txt", "built"]


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_workdir_behind_a_link_has_a_diff(box: Sandbox, replaced: bool) -> None:
    await prepared(
        box, "make /srv/r && mkdir -p /workspace && ln -s /srv/r /workspace/r", "/workspace/r", grading=False
    )
    await box.exec("cd /workspace/r && echo mended > a.txt", user="agent")
    if replaced:
        await box.exec("mkdir /srv/other && ln -sfn /srv/other /workspace/r", user="root")
    printed = (await box.exec(git_scripts.diff_script("/workspace/r", 100_000), user="root")).stdout.splitlines()
    diff = base64.b64decode(printed[1]).decode()
    assert ("+mended" in diff) == (not replaced) and ("deleted file" in diff) == replaced
    assert int(printed[0].split()[0]) == (4 if replaced else 1), diff
