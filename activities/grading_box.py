"""A grading box made ready: base commit, what the rules let through of the patch, and the task's own tests on top.

Why here: the order is the point: screened on the host, applied by root, runner settings put back, tests restored last and kept from change.
Called by: `activities/grade.py` and the admission of tasks.
"""

import base64
import binascii
from dataclasses import dataclass, field

from activities import git_scripts
from activities.graders.base import TestFiles
from activities.graders.config_sections import put_back
from activities.graders.integrity import Finding, PatchPolicy, Screened, needs_packages, screen_patch
from activities.graders.integrity_rules import RULES
from activities.graders.patches import FileChange, join, split
from activities.sandboxes.base import Sandbox
from ratchet.errors import CommandFailedError, GraderFailedError
from ratchet.store.tasks import TaskRow


@dataclass(slots=True)
class PreparedBox:
    """`may_have_broken_the_command`: the patch removes files or changes their kind, so a command that cannot start is its own deed."""

    applies: bool = True
    log: str = ""
    findings: list[Finding] = field(default_factory=list)
    may_have_broken_the_command: bool = False


class BoxPreparation:
    def __init__(self, box: Sandbox, task: TaskRow, seconds: float) -> None:
        self.box, self.task, self.seconds = box, task, seconds

    async def run(self, tests: TestFiles, base_commit: str | None, diff: bytes) -> PreparedBox:
        """Raises GraderFailedError where the row's own commands or tests are at fault."""
        changes = split(diff)
        await self._base(base_commit, bool(changes))
        screened = screen_patch(
            changes, PatchPolicy.of_task(self.task.spec, tests.paths), await self._python_files(changes)
        )
        prepared = PreparedBox(findings=screened.findings)
        prepared.may_have_broken_the_command = any(
            change.deleted or len(change.modes) > 1 or change.is_symlink for change in screened.kept
        )
        failed = await self._apply(screened.kept, tests)
        if failed is not None:
            return PreparedBox(False, failed, screened.findings)
        await self._put_back(screened)
        return prepared

    async def _base(self, base_commit: str | None, has_patch: bool) -> None:
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
                f"pre_commands made base commit {found[:12]} here and {base_commit[:12]} in the agent's box; make them deterministic"
            )

    async def _python_files(self, changes: list[FileChange]) -> frozenset[str]:
        if not needs_packages(changes):
            return frozenset()
        listed = await self.box.exec(
            git_scripts.python_files_script(self.task.workdir), user="root", timeout=self.seconds
        )
        return frozenset(listed.stdout.splitlines())

    async def _apply(self, kept: list[FileChange], tests: TestFiles) -> str | None:
        """What git said where the patch does not apply, None if all is in. A box without patch and tests needs nothing."""
        uploads = {
            git_scripts.PATCH: join(kept),
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

    async def _put_back(self, screened: Screened) -> None:
        """The runner's part of changed settings files becomes the base's again; adds a finding for each that differed."""
        paths = sorted(screened.sections)
        if not paths:
            return
        read = await self.box.exec(
            git_scripts.both_versions_script(self.task.workdir, paths), user="root", timeout=self.seconds
        )
        lines = read.stdout.splitlines()
        restore: list[str] = []
        for number, path in enumerate(paths):
            base, patched = _text(lines[2 * number]), _text(lines[2 * number + 1])
            if patched is None:
                continue
            merged = put_back(screened.sections[path], path, base, patched)
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


def _text(line: str) -> str | None:
    return None if line == "-" else base64.b64decode(line).decode(errors="surrogateescape")


def has_archive(task: TaskRow) -> bool:
    return bool(task.spec.get("repository_archive"))


async def upload_archive(box: Sandbox, task: TaskRow) -> None:
    """`metadata.repository_archive` (tar.gz, base64): the repository's files for images that do not hold them."""
    if has_archive(task):
        try:
            content = base64.b64decode(task.spec["repository_archive"], validate=True)
        except binascii.Error as error:
            raise GraderFailedError(f"metadata.repository_archive is no base64: {error}") from error
        await box.write_file(git_scripts.ARCHIVE, content, user="root")
