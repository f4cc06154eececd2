"""Judge a patch in a fresh box: apply what of it the integrity rules let through, run the hidden tests, give a verdict.

The stage `grade`, control runs and admission use the same code.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from grading import git_scripts
from grading.base import Grader, NoEvidenceError, TestRun, Verdict
from grading.blame import end_of, names_change, raise_unless_seen_before
from grading.broken_oracles import (
    SPEC,
    BrokenOracle,
    apply_edits,
    broken_spec,
    judge_repetition,
    named_lines,
    propose,
    spec_sources,
    validated,
)
from grading.diff_sections import FileChange
from grading.evidence import has_failed_test, has_passed
from grading.flags import Flag, static_flags
from grading.grading_box import BoxPreparation, PreparedBox
from grading.integrity_rules import ORDINARY_TESTS
from grading.oracle import Oracle
from grading.patch_screening import Finding, PatchPolicy
from grading.path_patterns import matches_pattern
from grading.run_hidden_tests import SELECTED_FILE, UnusableBoxError
from ratchet.config import RunConfig
from ratchet.errors import BugError, CommandFailedError, GraderFailedError
from ratchet.machine_faults import told_refusal
from ratchet.types import JsonObject, Suspicion
from sandboxes.base import Sandbox
from store.admissions import TaskOracle
from store.tasks import TaskRow

_MAX_TEST_FILES = 20


@dataclass(frozen=True, slots=True)
class GradingLimits:
    """Time limits of one grade in seconds. `user`: of the tests, unless the task names one."""

    eval_seconds: float
    workspace_seconds: float
    user: str = "agent"

    @classmethod
    def of_run(cls, config: RunConfig) -> Self:
        return cls(config.limits.eval_seconds, config.limits.workspace_seconds, config.grading.user)


@dataclass(frozen=True, slots=True)
class KnownRuns:
    """Known facts of a task's true runs. `oracle` None: not admitted. `broken`: its broken oracles by number."""

    oracle: Oracle | None = None
    broken: dict[int, BrokenOracle] = field(default_factory=dict)

    @property
    def selected(self) -> tuple[str, ...]:
        """Digests of the names of the tests that control runs repeat, empty if all."""
        return self.oracle.selected if self.oracle is not None else ()

    def control_choices(self) -> list[list[int]]:
        """Return for each control run the numbers of the broken oracles from which one is chosen.

        One run with larger expected numbers and one with smaller ones. If tests have no names, each broken oracle
        changes one assertion only, so each gets a run of its own, unless another one has the same edits.
        """
        if not any(broken.must_fail for broken in self.broken.values()):
            by_edits = {broken.edits: number for number, broken in sorted(self.broken.items(), reverse=True)}
            return [[number] for number in sorted(by_edits.values())]
        both = ([number for number, broken in sorted(self.broken.items()) if broken.up == up] for up in (True, False))
        return [numbers for numbers in both if numbers]

    def control_runs(self, seed: int) -> list[int | None]:
        """Return what a solved patch is run against: numbers of broken oracles, and None for the true tests.

        The order is random. A patch that knows that it has run before fails a repetition of the true tests or passes a
        broken oracle. If selected tests tell it so, the true tests run twice: then acting at random in these runs only
        succeeds no more often than in all runs.
        """
        rng = random.Random(f"control {seed}")
        runs: list[int | None] = [rng.choice(numbers) for numbers in self.control_choices()]
        for _ in range((2 if self.selected else 1) if runs else 0):
            runs.insert(rng.randrange(len(runs) + 1), None)
        return runs

    @classmethod
    def of_task(cls, stored: TaskOracle, spec: JsonObject) -> Self:
        """Read what admission has stored. A pool of the row itself counts if admission has made none."""
        oracle = None if stored.oracle is None else Oracle.of_json(stored.oracle)
        return cls(oracle, read_pool(stored.broken or row_pool(spec)))


def row_pool(spec: JsonObject) -> dict[int, JsonObject]:
    return dict(enumerate(spec.get("broken_oracles", ())))


def read_pool(stored: Mapping[int, JsonObject]) -> dict[int, BrokenOracle]:
    """Return a pool from its JSON."""
    return {number: BrokenOracle.of_json(content) for number, content in stored.items()}


class JudgedPatch(NamedTuple):
    """A verdict, the files of the patch that integrity rules named, and flags of suspicious code."""

    verdict: Verdict
    findings: list[Finding]
    flags: list[Flag]


class PatchRun(NamedTuple):
    """A run; if None, `not_run` is the verdict. `selected`: digests of the selected tests' names, empty if all ran."""

    prepared: PreparedBox
    run: TestRun | None
    not_run: Verdict | None = None
    selected: Collection[str] = ()


class EmptyRun(NamedTuple):
    """A run without a solution. `failed`: tests that failed. `failed_at`: lines that its log names (`NAME:LINE`)."""

    failed: list[str]
    failed_at: list[str]

    @classmethod
    def of_verdict(cls, verdict: Verdict, oracle: Oracle | None) -> Self:
        failed = sorted(name for name, outcome in verdict.tests.items() if not has_passed(name, outcome, oracle))
        return cls(failed, named_lines(verdict.log))


class BrokenTests(NamedTuple):
    """A broken oracle, which may be invalid, or the reason why there is none."""

    broken: BrokenOracle | None
    seconds: float
    reason: str


def find_grader(graders: Mapping[str, Grader], name: str) -> Grader:
    """Return the grader of this name. Raises BugError if there is none."""
    if name not in graders:
        raise BugError(f"no grader {name!r}; there are {', '.join(sorted(graders))}")
    return graders[name]


@dataclass(frozen=True, slots=True)
class PatchJudge:
    """Judges patches of one task. `base_commit` None: any base commit is accepted. `controlled`: a solved verdict gets
    control runs, or the patch is the task's own, so that the patch may change the runner's files.
    `suspected`: what earlier boxes showed; a box that shows one of these decides alone. Any other suspicion is a
    SuspectPatchError, and another box decides."""

    grader: Grader
    task: TaskRow
    limits: GradingLimits
    known: KnownRuns = KnownRuns()
    base_commit: str | None = None
    controlled: bool = False
    suspected: Collection[Suspicion] = frozenset(Suspicion)

    @property
    def _spec(self) -> JsonObject:
        return {**self.task.spec, "tests_user": self.task.spec.get("tests_user") or self.limits.user}

    @property
    def has_control_runs(self) -> bool:
        """True if control runs check a solved verdict."""
        return self.controlled and bool(self.known.broken)

    async def judge(self, box: Sandbox, diff: bytes) -> JudgedPatch:
        """Run the hidden tests on the patch in a fresh box and judge the run.

        Raises GraderFailedError if there is no verdict for a reason that is not the patch's, and the box's own errors.
        """
        done = await self.run(box, diff)
        findings = done.prepared.findings
        left_out = {finding.path for finding in findings}
        flags = await asyncio.to_thread(lambda: static_flags(done.prepared.changes, left_out))
        if done.run is not None:
            ended = self.known.oracle.early_end(done.run.observed) if self.known.oracle is not None else []
            flags += [*done.run.observed.flags, *ended]
        return JudgedPatch(self.verdict(done, self.known.oracle), findings, flags)

    async def run(
        self, box: Sandbox, diff: bytes, broken: BrokenOracle | None = None, selected: Collection[str] = ()
    ) -> PatchRun:
        """Run the hidden tests on the patch in a fresh box, with the edits of `broken` if it is given.

        `selected`: digests of the names of the tests to run, all if empty.
        """
        prepared = await self.prepare(box, diff)
        if selected:
            await box.write_file(SELECTED_FILE, "\n".join(selected), user="root")
        return (await self.run_tests(box, prepared, broken))._replace(selected=selected)

    async def prepare(self, box: Sandbox, diff: bytes) -> PreparedBox:
        """Put the patch and the task's tests into a fresh box."""
        preparation = BoxPreparation(box, replace(self.task, spec=self._spec), self.limits.workspace_seconds)
        tests = self.grader.test_files(self.task.spec)
        return await preparation.run(tests, self.base_commit, diff, self.controlled, self._expected_files())

    def _expected_files(self) -> frozenset[str]:
        """Return the base's test files with expected tests, which a patch must keep; none if the row lists tests."""
        oracle = self.known.oracle
        if oracle is None or not self.has_control_runs or PatchPolicy.of_task(self.task.spec, None).named_files:
            return frozenset()
        paths = {name.partition("::")[0] for name in oracle.passed}
        return frozenset(path for path in paths if matches_pattern(path, ORDINARY_TESTS))

    def gold_oracle(self, done: PatchRun) -> Oracle:
        """Return the oracle of a gold run that has run its tests, without tests that only the gold patch brings.

        These are in files that the gold patch makes or changes and that are not the task's: for example doctests of the
        product. In a row that lists no tests, files of the base that are named like tests are the task's. In one that
        lists the tests that count, code of other test files binds no patch.
        """
        assert done.run is not None
        policy = PatchPolicy.of_task(self.task.spec, self.grader.test_files(self.task.spec).paths)
        own = policy.named_files | (policy.test_files or frozenset())

        def is_own(change: FileChange) -> bool:
            is_named = policy.test_files is None and matches_pattern(change.path, ORDINARY_TESTS)
            return change.path in own or (is_named and not change.added)

        brought = {change.path for change in done.prepared.changes if not is_own(change)}
        oracle = Oracle.of_run(done.run.observed, done.run.outcomes).without_files(brought)
        if policy.named_files:  # the row lists the tests that count
            return replace(oracle, modules={path: codes for path, codes in oracle.modules.items() if path in own})
        return oracle

    async def test_sources(self, box: Sandbox, names: Sequence[str]) -> dict[str, bytes]:
        """Return the sources of the hidden tests in a prepared box, by target of an edit.

        `names`: tests that fail without a solution. Their files are read, or all if no name begins with one.
        """
        paths = sorted(self.grader.test_files(self.task.spec).paths or ())
        own = [path for path in paths if any(name.startswith(path + "::") for name in names)]
        sources = spec_sources(self.task.spec)
        for path in (own or paths)[:_MAX_TEST_FILES]:
            with contextlib.suppress(FileNotFoundError, CommandFailedError):
                sources[path] = await box.read_file(f"{self.task.workdir}/{path}", user="root")
        return sources

    async def _known_sources(self, box: Sandbox, targets: Iterable[str]) -> dict[str, bytes]:
        """Return those test files that the base commit has, as the agent's repository shows them."""
        known: dict[str, bytes] = {}
        for path in targets:
            if not path.startswith(SPEC):
                script = git_scripts.base_file_script(self.task.workdir, path)
                known[path] = (await box.exec(script, user="root", check=False)).stdout.encode()
        return known

    async def break_tests(self, box: Sandbox, gold: bytes, oracle: Oracle, empty: EmptyRun, number: int) -> BrokenTests:
        """Break the tests where they fail without a solution and find out, in a fresh box, which of them the gold patch
        fails.

        `number` of the try: even ones make expected numbers larger, odd ones smaller.
        """
        prepared = await self.prepare(box, gold)
        sources = await self.test_sources(box, empty.failed)
        known = await self._known_sources(box, sources)
        single = not oracle.outcomes
        candidate = propose(sources, empty.failed, number, single, known, empty.failed_at)
        if candidate is None:
            return BrokenTests(None, 0.0, "no assertion was found in the task's tests")
        done = await self.run_tests(box, prepared, candidate)
        if done.run is None:
            return BrokenTests(None, 0.0, "the broken tests did not run")
        broken = validated(candidate, oracle, done.run)
        reason = f"{len(broken.edits)} edits; the gold patch fails {len(broken.must_fail)} tests"
        return BrokenTests(broken, done.run.seconds, reason)

    async def run_tests(self, box: Sandbox, prepared: PreparedBox, broken: BrokenOracle | None = None) -> PatchRun:
        """Run the hidden tests in a prepared box, with the edits of `broken` if it is given."""
        not_run = self._not_run(prepared)
        if not_run is not None:
            return PatchRun(prepared, None, not_run)
        spec = self._spec
        seconds = min(self.limits.eval_seconds, spec.get("needed_settings", {}).get("limits.eval_seconds", math.inf))
        if broken is not None:
            await self._break_files(box, broken)
            spec = broken_spec(broken, spec)
        try:
            run = await self.grader.run(box, self.task.workdir, spec, seconds)
        except GraderFailedError as error:
            return PatchRun(prepared, None, self._blamed(prepared, error))
        oracle = self.known.oracle
        if run.observed.starved and oracle is not None and oracle.is_exceeded_by(run.observed.cpu_seconds, seconds):
            run = replace(run, observed=replace(run.observed, starved=False))
        return PatchRun(prepared, run)

    def verdict(self, done: PatchRun, oracle: Oracle | None) -> Verdict:
        """Judge a run, also one of selected tests. Raises GraderFailedError for a fault that is not the patch's."""
        if done.run is None:
            assert done.not_run is not None, "a run without tests has a verdict"
            return done.not_run
        if oracle is not None and self.has_control_runs:
            oracle = replace(oracle, may_run_more=True)
        try:
            verdict = self.grader.judge(done.run, self.task.spec, oracle)
            if done.selected and oracle is not None:
                verdict = judge_repetition(verdict, done.run, oracle, done.selected)
                oracle = oracle.only(done.selected)
        except GraderFailedError as error:
            return self._blamed(done.prepared, error)
        if not verdict.solved and not verdict.rejected:
            listed = verdict.tests if verdict.fail_to_pass is not None else None
            if not has_failed_test(done.run.outcomes, listed, oracle):
                raise_unless_seen_before(*end_of(done.run), self.suspected, done.run.observed.log)
            elif refusal := told_refusal(done.run.observed.log):
                seen = f"a test failed, and the log says {refusal!r}"
                raise_unless_seen_before(Suspicion.REFUSED, seen, self.suspected)
        return verdict

    def _not_run(self, prepared: PreparedBox) -> Verdict | None:
        """Return the verdict of a patch whose tests need not run, None if they have to."""
        deed = prepared.blame if prepared.applies else "the patch does not apply to its own base commit"
        if not deed:
            return None
        suspicion = Suspicion.NOT_PREPARED if prepared.applies else Suspicion.NOT_APPLIED
        raise_unless_seen_before(suspicion, deed, self.suspected, f"{deed}\n{prepared.log}")
        return Verdict(False, deed, prepared.log, 0.0)

    def _blamed(self, prepared: PreparedBox, error: GraderFailedError) -> Verdict:
        """Return `not solved` if the patch is to blame for an error of the grader, else raise the error.

        It may be if the task was admitted or the patch may have broken the command; for a NoEvidenceError only if the
        command failed and its log names a changed file. A first box only makes it suspect.
        """
        may_blame = self.known.oracle is not None or prepared.may_have_broken_the_command
        if isinstance(error, NoEvidenceError):
            dropped = {finding.path for finding in prepared.findings}
            kept = [one for one in prepared.changes if one.path not in dropped]
            may_blame = error.has_failed and names_change(error.log, kept)
        if isinstance(error, UnusableBoxError) or not may_blame:
            raise error
        raise_unless_seen_before(Suspicion.NOT_PREPARED, str(error), self.suspected, str(error))
        log = error.log if isinstance(error, NoEvidenceError) else ""
        return Verdict(False, f"the patch took away what the tests need: {error}", log, 0.0)

    async def _break_files(self, box: Sandbox, broken: BrokenOracle) -> None:
        for target in broken.digests:
            if not target.startswith(SPEC):
                path = f"{self.task.workdir}/{target}"
                source = await box.read_file(path, user="root")
                await box.write_file(path, apply_edits(broken, target, source), user="root")
