"""The activities of admission: a task is admitted if its gold patch always passes and its empty patch never does.

Broken and flaky tasks are found before any token is spent on them. A trial boots and judges as a rollout does
(`BoxCreator`, `PatchJudge`), but belongs to no rollout. The gold runs also make the task's oracle, and broken trials
its pool of broken oracles.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.box_lifecycle import BoxCreator, connected_box, kill_and_record, network_of, try_kill_box
from activities.dataset_import import grader_versions, import_dataset
from activities.datasets.formats import dataset_digest
from activities.diff import capture_diff
from activities.image_builds import ImageBuilds
from activities.stage import activity_stage, heartbeating
from grading.base import Grader, Verdict, decode_archive
from grading.broken_oracles import BrokenOracle, confirmed_pool, selectable_tests
from grading.git_scripts import ARCHIVE, prepare_script
from grading.grading_box import close_network, upload_archive
from grading.integrity_rules import LISTED_TEST
from grading.judge_patch import (
    BrokenTests,
    EmptyRun,
    GradingLimits,
    KnownRuns,
    PatchJudge,
    find_grader,
    read_pool,
    row_pool,
)
from grading.oracle import Oracle, merge_oracles
from grading.registry import GRADERS
from ratchet.config import DatasetConfig, SandboxConfig
from ratchet.errors import CommandFailedError, ConfigError, GraderFailedError, SandboxBusyError, SandboxGoneError
from ratchet.grading_payloads import (
    AdmissionInput,
    AdmissionResult,
    AdmitInput,
    AdmitPage,
    LabelledTask,
    Trial,
    TrialInput,
    TrialResult,
)
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import SandboxRole
from sandboxes.base import Sandbox, SandboxProvider
from store import admissions, sandboxes, tasks
from store.admissions import GraderVersion, NewAdmission
from store.database import Database
from store.sandboxes import LedgerRow, NewSandbox
from store.tasks import TaskRow

_PAGE = 100
_MAX_FAILED = 50
_NOT_ALONE = "control runs repeat all tests, because those that must fail were not seen to pass alone"
_BOX_MARGIN_SECONDS = 600.0
_MAX_GOLD_BYTES = 8_000_000
_T = TypeVar("_T")


@dataclass
class AdmitActivities:
    database: Database
    provider: SandboxProvider
    settings: TemporalSettings
    builds: ImageBuilds | None = None

    def __post_init__(self) -> None:
        self._creator = BoxCreator(self.database, self.provider, self.builds)

    @activity_stage("admit_page")
    async def admit_page(self, input: AdmitInput) -> AdmitPage:
        """Import the dataset if needed, and return the next tasks that have to be examined."""
        async with heartbeating():
            if not Path(input.dataset).is_absolute():
                raise ConfigError(f"dataset {input.dataset!r}: expected an absolute path, as the worker sees it")
            columns = input.model_dump(include={"input_key", "label_key", "metadata_key"})
            dataset = DatasetConfig(path=input.dataset, **columns)
            digest = await asyncio.to_thread(dataset_digest, dataset)
            async with self.database.begin() as connection:
                if input.after < 0:
                    offered = {
                        "limits.eval_seconds": input.eval_seconds,
                        "sandbox.network": input.network,
                        "grading.user": input.user,
                    }
                    await import_dataset(connection, dataset, digest, offered)
                rows = await tasks.page_of_tasks(connection, digest, input.after, _PAGE, input.labels, input.limit)
                versions = () if input.again else grader_versions()
                known = await admissions.admissions_of_dataset(connection, digest, versions, input.user)
        options = self.settings.stage_options("grade", input.eval_seconds + input.workspace_seconds + 300)
        return AdmitPage(
            tasks=[LabelledTask(row.task_id, row.label) for row in rows if row.task_id not in known],
            last=rows[-1].row_no if rows else None,
            trial=options.model_copy(update={"max_tries": 0}),
            record=self.settings.stage_options("record"),
        )

    @activity_stage("admit_trial")
    async def admit_trial(self, input: TrialInput) -> TrialResult:
        """Run one trial in a new box. If the box is lost, the result has an error instead of a verdict."""
        async with heartbeating():
            task = (await self.database.run(tasks.get_task, input.task_id)).with_network(input.network)
            started = time.monotonic()
            try:
                if input.patch != "empty" and not task.spec.get("gold_patch"):
                    task = await self._with_gold(task, input)
                tried = {"broken": self._break_oracle, "grade": self._grade_gold}.get(input.patch, self._judge)
                result = await self._in_box(task, input, lambda box: tried(box, task, input))
                return result.model_copy(update={"user": "" if task.spec.get("tests_user") else input.user})
            except (GraderFailedError, SandboxGoneError, ConfigError) as error:
                return TrialResult(patch=input.patch, error=str(error), seconds=time.monotonic() - started)

    async def _with_gold(self, task: TaskRow, input: TrialInput) -> TaskRow:
        """Return the task with the gold patch that its solution makes in a box like the agent's; store that patch.
        Raises GraderFailedError if the row has no solution, or if that makes no patch."""
        if not task.spec.get("solution_cmd"):
            raise GraderFailedError("the row has no gold_patch")
        gold = await self._in_box(task, input, lambda box: solve(box, task, input))
        await self.database.run(tasks.set_gold_patch, task.id, gold)
        return replace(task, spec={**task.spec, "gold_patch": gold})

    async def _in_box(self, task: TaskRow, input: TrialInput, work: Callable[[Sandbox], Awaitable[_T]]) -> _T:
        """Do the work in a new box, which is killed afterwards."""
        row = await self._reserve(task, input)
        seconds = int(input.eval_seconds + input.workspace_seconds + _BOX_MARGIN_SECONDS)
        ttl_seconds = min(seconds, self.provider.capabilities.max_ttl_seconds)
        try:
            network = network_of(SandboxRole.GRADE, task.opened)
            provider_id = await self._creator.create(row, task.image, ttl_seconds=ttl_seconds, network=network)
        except ConfigError:  # for example an unknown image: free the box's place, an admission may run for hours
            await kill_and_record(self.database, self.provider, [row])
            raise
        try:
            async with connected_box(self.provider, provider_id) as box:
                return await work(box)
        finally:
            await try_kill_box(self.database, self.provider, row.id, provider_id)

    async def _judge(self, box: Sandbox, task: TaskRow, input: TrialInput) -> TrialResult:
        """Judge the gold or the empty patch by the oracle of the gold runs so far, of which a gold run is one."""
        judge = _judge_of(task, input)
        version = _version(judge.grader)
        async with self.database.begin() as connection:
            if input.patch == "gold" and input.repeat == 0:
                await admissions.delete_trials(connection, task.id, version)
            oracle = (await _examined(connection, task.id, version)).oracle
        done = await judge.run(box, _gold(task) if input.patch == "gold" else b"")
        if input.patch == "gold" and done.run is not None:
            oracle = judge.gold_oracle(done)
        verdict = judge.verdict(done, oracle)
        if input.patch == "gold" and oracle is not None and verdict.solved:
            await self.database.run(admissions.store_trial, task.id, version, input.repeat, oracle.as_json())
        run = EmptyRun.of_verdict(verdict, oracle)
        failed_at = run.failed_at if input.patch == "empty" else []
        return _trial(input.patch, verdict, failed=run.failed[:_MAX_FAILED], failed_at=failed_at)

    async def _grade_gold(self, box: Sandbox, task: TaskRow, input: TrialInput) -> TrialResult:
        """Judge the gold patch by the task's oracle, screened as a rollout's grade screens it: by every rule if no
        broken oracle is valid, so that no control run would follow. If control runs could repeat some tests alone, only
        these run, which is a `control` trial."""
        judge = _judge_of(task, input)
        examined = await self.database.run(_examined, task.id, _version(judge.grader))
        known = replace(examined, broken=_final_pool(examined, task))
        assert known.oracle is not None, "only a task whose gold patch passed gets this trial"
        judge = replace(judge, known=known, controlled=bool(known.broken))
        selected = selectable_tests(known.broken.values(), known.oracle)
        if selected:
            return await _try_alone(box, judge, _gold(task), selected)
        judged = await judge.judge(box, _gold(task))
        screened = () if known.broken else (one.path for one in judged.findings if one.rule != LISTED_TEST.name)
        return _trial("grade", judged.verdict, left_out=sorted(set(screened))[:_MAX_FAILED])

    async def _break_oracle(self, box: Sandbox, task: TaskRow, input: TrialInput) -> TrialResult:
        """Break the tests at random places and find out which of them the gold patch fails; add them to the pool."""
        judge = _judge_of(task, input)
        version = _version(judge.grader)
        async with self.database.begin() as connection:
            if input.repeat == 0:
                await admissions.delete_broken_oracles(connection, task.id, version)
            known = await _examined(connection, task.id, version)
        assert known.oracle is not None, "only a task whose gold patch passed gets a pool"
        empty = EmptyRun(input.failing, input.failed_at)
        made = await judge.break_tests(box, _gold(task), known.oracle, empty, input.repeat)
        if made.broken is None:
            return TrialResult(patch="broken", error=made.reason, seconds=made.seconds)
        if made.broken.is_valid:
            await self.database.run(
                admissions.store_broken_oracle, task.id, version, input.repeat, made.broken.as_json()
            )
        return broken_trial(made, known.broken, input.repeat)

    async def _reserve(self, task: TaskRow, input: TrialInput) -> LedgerRow:
        """Kill boxes of earlier tries of this trial and reserve a new one. Raises SandboxBusyError if none is free."""
        workflow_id = activity.info().workflow_id
        assert workflow_id is not None
        user = f"admit:{task.id}:{input.patch}:{input.repeat}"
        left = await self.database.run(sandboxes.sandboxes_of_user, workflow_id, user)
        await kill_and_record(self.database, self.provider, left)
        new = NewSandbox(
            provider=self.provider.name,
            role=SandboxRole.GRADE,
            rollout_id=None,
            attempt=0,
            workflow_id=workflow_id,
            image=task.image,
            used_by=user,
        )
        async with self.database.begin() as connection:
            max_boxes = SandboxConfig().max_boxes
            row = await sandboxes.reserve_sandbox(connection, new, max_boxes, max_boots=max_boxes)
        if row is None:
            raise SandboxBusyError("all boxes are taken", retry_after_seconds=5)
        return row

    @activity_stage("record_admission")
    async def record_admission(self, input: AdmissionInput) -> AdmissionResult:
        """Decide and store the result with its evidence, in place of an earlier one of the same grader version."""
        async with self.database.begin() as connection:
            task = await tasks.get_task(connection, input.task_id)
            version = _version(find_grader(GRADERS, task.grader))
            decided = decide_admission(input.trials)
            gold = [trial.seconds for trial in input.trials if trial.patch == "gold" and not trial.error]
            known = await _examined(connection, input.task_id, version)
            oracle = _with_selection(known.oracle, _final_pool(known, task), input.trials)
            admission = NewAdmission(
                task_id=input.task_id,
                grader=version.grader,
                grader_version=version.version,
                admitted=decided.admitted,
                reason=decided.reason,
                evidence=[trial.model_dump() for trial in input.trials],
                gold_seconds=median(gold) if gold else None,
                oracle=None if oracle is None else oracle.as_json(),
            )
            await admissions.store_admission(connection, admission)
            await admissions.delete_trials(connection, input.task_id, version)
            if known.oracle is not None:  # else this was recorded before, and its answer was lost
                await admissions.delete_broken_oracles(connection, input.task_id, version)
                for number, broken in confirmed_pool(known.broken).items():
                    await admissions.store_broken_oracle(connection, input.task_id, version, number, broken.as_json())
        return decided


async def _examined(connection: AsyncConnection, task_id: int, version: GraderVersion) -> KnownRuns:
    """Return what the trials of an examination have found so far: what its gold runs have in common, and the pool."""
    runs = [Oracle.of_json(one) for one in await admissions.trials_of_task(connection, task_id, version)]
    pool = read_pool(await admissions.pool_of_task(connection, task_id, version))
    return KnownRuns(merge_oracles(runs) if runs else None, pool)


def _final_pool(examined: KnownRuns, task: TaskRow) -> dict[int, BrokenOracle]:
    """Return the pool that the task's grades will use: what is confirmed, else the row's own."""
    return confirmed_pool(examined.broken) or read_pool(row_pool(task.spec))


def _with_selection(
    oracle: Oracle | None, pool: Mapping[int, BrokenOracle], trials: Sequence[TrialResult]
) -> Oracle | None:
    """Return the oracle with the tests that control runs repeat, if the gold patch has always passed them alone."""
    control = [trial for trial in trials if trial.patch == "control"]
    if oracle is None or not control or not all(trial.solved for trial in control):
        return oracle
    return replace(oracle, selected=selectable_tests(pool.values(), oracle))


async def solve(box: Sandbox, task: TaskRow, input: TrialInput) -> str:
    """Run the row's solution as root; return its patch, at any exit code. GraderFailedError if it makes none."""
    spec = task.spec
    archive = await upload_archive(box, task.spec)
    unpack = f"tar -xzf {ARCHIVE} -C / --no-same-owner && rm -f {ARCHIVE}"
    prepare = prepare_script(task.workdir, spec["pre_commands"], None, archive=archive)
    try:
        await box.exec(prepare, user="root", timeout=input.workspace_seconds)
        await close_network(box, task.opened, SandboxRole.GRADE)
        await box.write_file(ARCHIVE, decode_archive(spec, "solution_archive"), user="root")  # the repository's place
        unpacked = await box.exec(unpack, user="root", check=False, timeout=input.workspace_seconds)
        if unpacked.exit_code:
            told = unpacked.stderr.strip()[-400:]
            raise GraderFailedError(f"metadata.solution_archive cannot be unpacked; pack it again as tar.gz: {told}")
        seconds = input.eval_seconds
        ended = await box.exec(spec["solution_cmd"], user="root", cwd=task.workdir, timeout=seconds, check=False)
        captured = await capture_diff(box, task.workdir, _MAX_GOLD_BYTES, input.workspace_seconds)
        patch = captured.diff.decode()
    except (CommandFailedError, UnicodeDecodeError) as error:
        raise GraderFailedError(f"the task's solution made no patch: {error}") from error
    if not patch:
        printed = f"exit code {ended.exit_code}: {ended.stderr.strip()[-400:]}"
        raise GraderFailedError(
            f"the task's solution changed no file below {task.workdir}, and only these are graded "
            f"({captured.reason or printed})"
        )
    return patch


def _trial(patch: Trial, verdict: Verdict, **named: list[str]) -> TrialResult:
    """Return the result of a trial with a verdict. `named`: its lists of tests, lines or files."""
    told = TrialResult(patch=patch, solved=verdict.solved, reason=verdict.reason, seconds=verdict.duration_seconds)
    return told.model_copy(update=named)


async def _try_alone(box: Sandbox, judge: PatchJudge, gold: bytes, selected: tuple[str, ...]) -> TrialResult:
    """Run only the selected tests on the gold patch. If they fail, or the box does, control runs repeat all tests."""
    try:
        verdict = judge.verdict(await judge.run(box, gold, selected=selected), judge.known.oracle)
    except (GraderFailedError, SandboxGoneError) as error:
        return TrialResult(patch="control", reason=f"{_NOT_ALONE}: {error}")
    told = f"control runs repeat {len(selected)} tests" if verdict.solved else f"{_NOT_ALONE}: {verdict.reason}"
    return TrialResult(patch="control", solved=verdict.solved, reason=told, seconds=verdict.duration_seconds)


def broken_trial(made: BrokenTests, pool: dict[int, BrokenOracle], number: int) -> TrialResult:
    """Return the result of a broken trial: an odd one is not solved if its even counterpart does not confirm it."""
    assert made.broken is not None
    solved = made.broken.is_valid
    reason = made.reason
    if solved and number % 2 and number not in confirmed_pool({**pool, number: made.broken}):
        solved = False
        reason = f"{reason}; the tests do not require equality, since another value passes, too"
    elif solved and made.broken.is_weak:
        reason = f"{reason}; weakly controlled: assertions are negated only, since no expected value was found"
    return TrialResult(patch="broken", solved=solved, reason=reason, seconds=made.seconds)


def _judge_of(task: TaskRow, input: TrialInput) -> PatchJudge:
    # The trials find that out; a command that prints nothing of tests can be judged for it.
    task = replace(task, spec={**task.spec, "empty_patch_fails": True})
    limits = GradingLimits(input.eval_seconds, input.workspace_seconds, input.user)
    return PatchJudge(find_grader(GRADERS, task.grader), task, limits, controlled=input.patch != "empty")


def _version(grader: Grader) -> GraderVersion:
    return GraderVersion(grader.name, grader.version)


def _gold(task: TaskRow) -> bytes:
    return str(task.spec["gold_patch"]).encode()


def decide_admission(trials: Sequence[TrialResult]) -> AdmissionResult:
    """Admit a task if every gold trial is solved and no empty one is; otherwise give the reason."""
    gold = [trial for trial in trials if trial.patch == "gold"]
    empty = [trial for trial in trials if trial.patch == "empty"]
    has_pool = any(trial.patch == "broken" and trial.solved for trial in trials)
    graded = next((trial for trial in trials if trial.patch == "grade" and not (has_pool and trial.error)), None)
    error = next((trial for trial in [*gold, *empty, graded] if trial is not None and trial.error), None)
    if error is not None:
        tried = "empty" if error.patch == "empty" else "gold"
        return AdmissionResult(admitted=False, reason=f"the {tried} patch got no verdict: {error.error}")
    if not gold or not empty:
        return AdmissionResult(admitted=False, reason="both patches have to be tried")
    num_passed = sum(trial.solved for trial in gold)
    num_failed = sum(not trial.solved for trial in empty)
    reasons = []
    if num_passed < len(gold):
        first = next(trial for trial in gold if not trial.solved)
        flaky = "flaky: " if num_passed else ""
        reasons.append(f"the gold patch passed {num_passed} of {len(gold)} times ({flaky}{first.reason})")
    if num_failed < len(empty):
        flaky = " (flaky)" if num_failed else ""
        reasons.append(f"the empty patch failed {num_failed} of {len(empty)} times{flaky}")
    if graded is not None and not graded.solved:
        reasons.append(
            f"no control run can check this task's grades, so {', '.join(graded.left_out)} of the gold patch is left "
            f"out, and it is not solved ({graded.reason}); `metadata.integrity.allow` keeps files of a patch"
            if graded.left_out
            else f"the gold patch passed and then failed as a grade (flaky: {graded.reason})"
        )
    return AdmissionResult(admitted=not reasons, reason="; ".join(reasons))
