"""Prepare a grading box: the base commit, the screened patch, and the task's tests on top.

The order matters for integrity: the patch is screened on the host, applied by root, the tests are put in after it and
protected from change, and the runner's settings are restored last. Nothing of the product runs meanwhile, so a
preparation that fails with the patch and works without it is the patch's fault.
"""

import asyncio
import base64
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from grading import git_scripts
from grading.base import TestFiles, decode_archive, tests_user
from grading.diff_sections import FileChange, join_diff, split_diff
from grading.patch_screening import LEFT_OUT, PUT_BACK, Finding, PatchPolicy, ScreenedPatch, screen_patch
from grading.runner_programs import has_test_commands
from grading.runner_settings import MAX_SETTINGS_BYTES, restore_runner_settings
from grading.task_tests import BaseTree
from ratchet.errors import CommandFailedError, GraderFailedError
from ratchet.types import PRE_COMMANDS, JsonObject, SandboxRole
from sandboxes.base import Sandbox
from store.tasks import TaskRow

_IMPORT = re.compile(r"\b(?:import|from|require|require_relative|include|load|source|use|mod)\b")
_MAX_SETTINGS_FILES = 200
"""Settings files of a patch whose runner part is restored; further ones are restored as a whole."""


@dataclass(slots=True)
class PreparedBox:
    """Result of the preparation. `applies`: whether the patch applied; `log`: git's message if not. `changes`: the
    patch's files, also those that were left out.

    `blame`: why the tests cannot run with the patch, although they can without it; empty if they can.
    `may_have_broken_the_command`: the patch removes files or changes their kind, so the patch is to blame if the test
    command cannot start.
    """

    applies: bool = True
    log: str = ""
    findings: list[Finding] = field(default_factory=list)
    may_have_broken_the_command: bool = False
    blame: str = ""
    changes: list[FileChange] = field(default_factory=list)


class _Versions(NamedTuple):
    """A file's content in the base and now; None: there is no such file."""

    base: bytes | None
    present: bytes | None


class _PatchDoesNotApplyError(Exception):
    """Git refused the patch. The text is git's message."""


class BoxPreparation:
    """Prepares one box for one task, whose spec names the tests' user. `seconds`: time limit of each script."""

    def __init__(self, box: Sandbox, task: TaskRow, seconds: float) -> None:
        self.box = box
        self.task = task
        self.seconds = seconds
        self.user = tests_user(task.spec)

    async def run(
        self,
        tests: TestFiles,
        base_commit: str | None,
        diff: bytes,
        controlled: bool = False,
        expected: frozenset[str] = frozenset(),
    ) -> PreparedBox:
        """Prepare the box for `diff`. `controlled`: a control run checks the verdict if it is `solved`.
        `expected`: test files of the base whose tests have to pass as they are.

        Raises GraderFailedError if the row's own commands or tests fail.
        """
        changes = await asyncio.to_thread(split_diff, diff)
        await self._make_base(base_commit, bool(changes))
        if not changes:
            await self._put_in([], tests)
            return PreparedBox()
        policy = PatchPolicy.of_task(self.task.spec, tests.paths, controlled, expected)
        base = await self._read_base(tests)
        screened = await asyncio.to_thread(screen_patch, changes, policy, base)
        prepared = PreparedBox(findings=screened.findings, changes=changes)
        prepared.may_have_broken_the_command = any(change.is_gone for change in screened.kept)
        try:
            await self._put_in(screened.kept, tests)
            await self._restore_settings(screened)
        except _PatchDoesNotApplyError as error:
            prepared.applies = False
            prepared.log = str(error)
        except (CommandFailedError, GraderFailedError) as error:
            await self._try_without_patch(tests)
            prepared.blame = f"the tests can be put in without the patch, but not with it: {error}"
        return prepared

    async def _try_without_patch(self, tests: TestFiles) -> None:
        """Put the tests into the base commit. Raises GraderFailedError if this fails, too."""
        try:
            await self._execute(git_scripts.reset_script(self.task.workdir, self.user))
            await self._put_in([], tests)
        except CommandFailedError as error:
            raise GraderFailedError(f"the grading box could not be prepared: {error}") from error

    async def _make_base(self, base_commit: str | None, has_patch: bool) -> None:
        archive = await upload_archive(self.box, self.task.spec)
        script = git_scripts.prepare_script(
            self.task.workdir, self.task.spec["pre_commands"], None, archive=archive, keep_history=True, user=self.user
        )
        try:
            printed = await self._execute(script)
        except CommandFailedError as error:
            raise GraderFailedError(f"the grading box could not be prepared: {error}") from error
        await close_network(self.box, self.task.opened, SandboxRole.GRADE)
        found = printed.strip().splitlines()[-1]
        if has_patch and base_commit is not None and found != base_commit:
            raise GraderFailedError(
                f"pre_commands made base commit {found[:12]} here and {base_commit[:12]} in the agent's box; "
                "make them deterministic"
            )

    async def _execute(self, script: str) -> str:
        return (await self.box.exec(script, user="root", timeout=self.seconds)).stdout

    async def _upload_paths(self, paths: Sequence[str]) -> None:
        await self.box.write_file(git_scripts.PATHS, git_scripts.path_list(paths), user="root")

    async def _read_base(self, tests: TestFiles) -> BaseTree:
        """Read what the rules need of the base commit, before the patch is applied."""
        try:
            listed, imports, *_ = (await self._execute(git_scripts.base_tree_script(self.task.workdir))).splitlines()
            paths = base64.b64decode(listed).decode(errors="surrogateescape").split("\0")[:-1]
            settings = [path for path in paths if has_test_commands(path)]
            settings = sorted(settings, key=lambda path: (path.count("/"), path))[:_MAX_SETTINGS_FILES]
            texts = await self._read_versions(settings)
        except (CommandFailedError, ValueError) as error:
            raise GraderFailedError(f"the base commit could not be read: {error}") from error
        return BaseTree(
            files=frozenset(paths),
            imports=base64.b64decode(imports).decode(errors="replace") + _import_lines(tests.patch),
            settings={
                path: (text.base or b"").decode(errors="replace") for path, text in zip(settings, texts, strict=True)
            },
        )

    async def _put_in(self, kept: list[FileChange], tests: TestFiles) -> None:
        """Apply the patch and the tests.

        Raises _PatchDoesNotApplyError, GraderFailedError if the tests cannot be put in, CommandFailedError if time or
        disk does not suffice.
        """
        uploads = {
            git_scripts.PATCH: join_diff(kept),
            git_scripts.TEST_PATCH: tests.patch,
            git_scripts.TEST_ARCHIVE: tests.archive,
        }
        for path, content in uploads.items():
            if content:
                await self.box.write_file(path, content, user="root")
        if not any(uploads.values()) and not tests.commands and not tests.paths:
            return
        script = git_scripts.apply_script(
            self.task.workdir,
            patch=bool(uploads[git_scripts.PATCH]),
            test_patch=bool(uploads[git_scripts.TEST_PATCH]),
            test_archive=bool(uploads[git_scripts.TEST_ARCHIVE]),
            test_commands=tests.commands,
            user=self.user,
        )
        if tests.paths:
            await self._upload_paths(sorted(tests.paths))
            script += "\n" + git_scripts.protect_script(self.task.workdir)
        result = await self.box.exec(script, user="root", check=False, timeout=self.seconds)
        if result.exit_code == git_scripts.DOES_NOT_APPLY:
            raise _PatchDoesNotApplyError(result.stderr)
        if result.exit_code != 0:
            what = (
                "the task's tests could not be put in"
                if result.exit_code == git_scripts.TESTS_DO_NOT_APPLY
                else "applying the patch failed"
            )
            raise GraderFailedError(f"{what}: {result.stderr.strip()[-400:]}")

    async def _read_versions(self, paths: Sequence[str]) -> list[_Versions]:
        if not paths:
            return []
        await self._upload_paths(paths)
        lines = (
            await self._execute(git_scripts.both_versions_script(self.task.workdir, MAX_SETTINGS_BYTES))
        ).splitlines()
        decoded = [None if line == "-" else base64.b64decode(line) for line in lines]
        return [_Versions(*pair) for pair in zip(decoded[::2], decoded[1::2], strict=True)]

    async def _restore_settings(self, screened: ScreenedPatch) -> None:
        """Restore the runner's part of settings files from the base; add a finding for each that differed."""
        paths = sorted(screened.sections)
        parsed = paths[:_MAX_SETTINGS_FILES]
        versions = await self._read_versions(parsed)
        merged: dict[str, bytes] = {}
        restored: list[str] = paths[_MAX_SETTINGS_FILES:]
        for path, version in zip(parsed, versions, strict=True):
            rule = screened.sections[path]
            if version.present is None:
                continue
            content = await asyncio.to_thread(restore_runner_settings, rule.sections, version.base, version.present)
            if content is not None and content != version.present:
                merged[path] = content
                screened.findings.append(Finding.of(rule, path, PUT_BACK))
            elif content is None:
                restored.append(path)
        screened.findings += [Finding.of(screened.sections[path], path, LEFT_OUT) for path in restored]
        await self._write(merged)
        if restored:
            await self._upload_paths(restored)
            await self._execute(git_scripts.restore_script(self.task.workdir, self.user))

    async def _write(self, contents: dict[str, bytes]) -> None:
        if not contents:
            return
        for number, content in enumerate(contents.values()):
            await self.box.write_file(f"{git_scripts.MERGED}/{number}", content, user="root")
        await self._upload_paths(list(contents))
        await self._execute(git_scripts.write_script(self.task.workdir))


def _import_lines(patch: bytes) -> str:
    """Return the lines of the hidden tests that import or include something."""
    return "\n".join(line for line in patch.decode(errors="replace").split("\n") if _IMPORT.search(line))


async def close_network(box: Sandbox, opened: Collection[str], role: SandboxRole) -> None:
    """Close the network of a box that had it for `pre_commands` alone. `opened`: as `sandbox.network`."""
    if PRE_COMMANDS in opened and role not in opened:
        await box.set_network(role is SandboxRole.AGENT)


async def upload_archive(box: Sandbox, spec: JsonObject) -> bool:
    """Upload `metadata.repository_archive`; return whether the row has one. Raises GraderFailedError for no base64."""
    content = decode_archive(spec, "repository_archive")
    if content:
        await box.write_file(git_scripts.ARCHIVE, content, user="root")
    return bool(content)
