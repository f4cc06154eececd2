"""Prepare a grading box: the base commit, the screened patch, and the task's tests on top.

The order matters for integrity: the patch is screened on the host, applied by root, the tests are put in after it and
protected from change, and the runner's settings are restored last.
"""

import base64
import binascii
from dataclasses import dataclass, field

from activities import git_scripts
from activities.graders.base import TestFiles
from activities.graders.diff_sections import FileChange, join_diff, split_diff
from activities.graders.integrity_rules import RULES
from activities.graders.patch_screening import (
    Finding,
    PatchPolicy,
    ScreenedPatch,
    needs_python_files,
    screen_patch,
)
from activities.graders.runner_settings import restore_runner_settings
from activities.sandboxes.base import Sandbox
from ratchet.errors import CommandFailedError, GraderFailedError
from ratchet.store.tasks import TaskRow


@dataclass(slots=True)
class PreparedBox:
    """Result of the preparation. `applies`: whether the patch applied; `log`: git's message if not.

    `may_have_broken_the_command`: the patch removes files or changes their kind, so the patch is to blame if the test
    command cannot start.
    """

    applies: bool = True
    log: str = ""
    findings: list[Finding] = field(default_factory=list)
    may_have_broken_the_command: bool = False


class BoxPreparation:
    """Prepares one box for one task. `seconds`: time limit of each script."""

    def __init__(self, box: Sandbox, task: TaskRow, seconds: float) -> None:
        self.box = box
        self.task = task
        self.seconds = seconds

    async def run(
        self, tests: TestFiles, base_commit: str | None, diff: bytes, controlled: bool = False
    ) -> PreparedBox:
        """Prepare the box for `diff`. Raises GraderFailedError if the row's own commands or tests fail.

        `controlled`: a control run checks a solved verdict.
        """
        changes = split_diff(diff)
        await self._make_base(base_commit, bool(changes))
        screened = screen_patch(
            changes, PatchPolicy.of_task(self.task.spec, tests.paths, controlled), await self._python_files(changes)
        )
        prepared = PreparedBox(findings=screened.findings)
        prepared.may_have_broken_the_command = any(
            change.deleted or len(change.modes) > 1 or change.is_symlink for change in screened.kept
        )
        failed = await self._apply(screened.kept, tests)
        if failed is not None:
            return PreparedBox(False, failed, screened.findings)
        await self._restore_settings(screened)
        return prepared

    async def _make_base(self, base_commit: str | None, has_patch: bool) -> None:
        await upload_archive(self.box, self.task)
        script = git_scripts.prepare_script(
            self.task.workdir, self.task.spec["pre_commands"], None, archive=has_archive(self.task), keep_history=True
        )
        try:
            result = await self.box.exec(script, user="root", timeout=self.seconds)
        except CommandFailedError as error:
            raise GraderFailedError(f"the grading box could not be prepared: {error}") from error
        found = result.stdout.strip().splitlines()[-1]
        if has_patch and base_commit is not None and found != base_commit:
            raise GraderFailedError(
                f"pre_commands made base commit {found[:12]} here and {base_commit[:12]} in the agent's box; "
                "make them deterministic"
            )

    async def _python_files(self, changes: list[FileChange]) -> frozenset[str]:
        if not needs_python_files(changes):
            return frozenset()
        listed = await self.box.exec(
            git_scripts.python_files_script(self.task.workdir), user="root", timeout=self.seconds
        )
        return frozenset(listed.stdout.splitlines())

    async def _apply(self, kept: list[FileChange], tests: TestFiles) -> str | None:
        """Apply the patch and the tests. Return git's message if the patch does not apply, None if all is applied."""
        uploads = {
            git_scripts.PATCH: join_diff(kept),
            git_scripts.TEST_PATCH: tests.patch,
            git_scripts.TEST_ARCHIVE: tests.archive,
        }
        for path, content in uploads.items():
            if content:
                await self.box.write_file(path, content, user="root")
        present = {path: bool(content) for path, content in uploads.items()}
        if not any(present.values()) and not tests.commands and not tests.paths:
            return None
        script = git_scripts.apply_script(
            self.task.workdir,
            patch=present[git_scripts.PATCH],
            test_patch=present[git_scripts.TEST_PATCH],
            test_archive=present[git_scripts.TEST_ARCHIVE],
            test_commands=tests.commands,
        )
        if tests.paths:
            script += "\n" + git_scripts.protect_script(self.task.workdir, tests.paths)
        result = await self.box.exec(script, user="root", check=False, timeout=self.seconds)
        if result.exit_code == git_scripts.DOES_NOT_APPLY:
            return result.stderr
        if result.exit_code != 0:
            what = (
                "the task's tests could not be put in"
                if result.exit_code == git_scripts.TESTS_DO_NOT_APPLY
                else "applying the patch failed"
            )
            raise GraderFailedError(f"{what}: {result.stderr.strip()[-400:]}")
        return None

    async def _restore_settings(self, screened: ScreenedPatch) -> None:
        """Restore the runner's part of changed settings files from the base, and add a finding for each that
        differed."""
        paths = sorted(screened.sections)
        if not paths:
            return
        read = await self.box.exec(
            git_scripts.both_versions_script(self.task.workdir, paths), user="root", timeout=self.seconds
        )
        lines = read.stdout.splitlines()
        restore: list[str] = []
        for number, path in enumerate(paths):
            base = _decoded(lines[2 * number])
            patched = _decoded(lines[2 * number + 1])
            if patched is None:
                continue
            merged = restore_runner_settings(screened.sections[path], path, base, patched)
            if merged is None:
                restore.append(path)
            elif merged != patched:
                await self.box.write_file(f"{self.task.workdir}/{path}", merged, user="agent")
                screened.findings.append(Finding(_rule_of(screened.sections[path]), path, "put back"))
        if restore:
            await self.box.exec(
                git_scripts.restore_script(self.task.workdir, restore), user="root", timeout=self.seconds
            )
            screened.findings += [Finding(_rule_of(screened.sections[path]), path, "left out") for path in restore]


def _rule_of(kind: str) -> str:
    return next(rule.name for rule in RULES if rule.sections == kind)


def _decoded(line: str) -> str | None:
    return None if line == "-" else base64.b64decode(line).decode(errors="surrogateescape")


def has_archive(task: TaskRow) -> bool:
    """Return whether the row brings the repository's files."""
    return bool(task.spec.get("repository_archive"))


async def upload_archive(box: Sandbox, task: TaskRow) -> None:
    """Upload `metadata.repository_archive` (tar.gz, base64), for images without the repository.

    Raises GraderFailedError if it is not base64.
    """
    if has_archive(task):
        try:
            content = base64.b64decode(task.spec["repository_archive"], validate=True)
        except binascii.Error as error:
            raise GraderFailedError(f"metadata.repository_archive is not base64: {error}") from error
        await box.write_file(git_scripts.ARCHIVE, content, user="root")
