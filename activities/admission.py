"""The stages of admission: a task may be trained on once its gold patch passes and its empty patch fails, every time.

Why here: flaky or broken tasks teach noise, and they are found before a single token is spent on them.
Called by: the `AdmitTasks` workflow.
"""

import asyncio
import time
from pathlib import Path
from statistics import median
from uuid import UUID

from temporalio import activity

from activities.boot import INSTALLATION_KEY, UUID_KEY, kill_and_record, try_kill_box
from activities.dataset_import import dataset_of, import_dataset
from activities.datasets.formats import dataset_digest
from activities.grade import grader_of, judge_patch
from activities.graders.base import PASSED, Grader, Verdict
from activities.graders.registry import GRADERS
from activities.sandboxes.base import SandboxProvider
from activities.stage import activity_stage, heartbeating
from ratchet.config import RunConfig
from ratchet.errors import ConfigError, GraderFailedError, SandboxBusyError, SandboxGoneError
from ratchet.grading_payloads import AdmissionInput, AdmissionResult, AdmitInput, AdmitPage, TrialInput, TrialResult
from ratchet.store import admissions, sandboxes, tasks
from ratchet.store.database import Database
from ratchet.store.tasks import TaskRow
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import SandboxRole

_PAGE = 100
_MAX_FAILED = 50
_BOX_MARGIN_SECONDS = 600.0


class AdmitActivities:
    def __init__(
        self, database: Database, provider: SandboxProvider, settings: TemporalSettings, installation: UUID
    ) -> None:
        self.database, self.provider, self.settings, self.installation = database, provider, settings, installation

    @activity_stage("admit_page")
    async def admit_page(self, input: AdmitInput) -> AdmitPage:
        """Imports the dataset (again: nothing changes) and returns the next tasks that have to be examined."""
        async with heartbeating():
            if not Path(input.dataset).is_absolute():
                raise ConfigError(f"dataset {input.dataset!r}: expected an absolute path, as the worker sees it")
            dataset = dataset_of(input)
            digest = await asyncio.to_thread(dataset_digest, dataset)
            async with self.database.begin() as connection:
                if input.after < 0:
                    await import_dataset(connection, dataset, digest)
                rows = await tasks.page_of_tasks(connection, digest, input.after, _PAGE, input.labels, input.limit)
                known = (
                    {} if input.again else await admissions.admissions_of_dataset(connection, digest, grader_versions())
                )
        options = self.settings.stages.grade.options(input.eval_seconds + input.workspace_seconds + 300)
        return AdmitPage(
            tasks=[(task_id, label) for task_id, label, _ in rows if task_id not in known],
            last=rows[-1][2] if rows else None,
            trial=options.model_copy(update={"max_tries": 0}),
            record=self.settings.stages.record.options(),
        )

    @activity_stage("admit_trial")
    async def admit_trial(self, input: TrialInput) -> TrialResult:
        """Grades one patch in a box of its own. A box that is lost is an error of this trial, not a verdict."""
        async with heartbeating():
            async with self.database.begin() as connection:
                task = await tasks.get_task(connection, input.task_id)
            gold = task.spec.get("gold_patch")
            if input.patch == "gold" and not gold:
                return TrialResult(patch="gold", error="the row has no gold_patch")
            started = time.monotonic()
            try:
                verdict = await self._graded(task, str(gold).encode() if input.patch == "gold" else b"", input)
            except (GraderFailedError, SandboxGoneError, ConfigError) as error:
                return TrialResult(patch=input.patch, error=str(error), seconds=time.monotonic() - started)
        failed = sorted(name for name, outcome in verdict.tests.items() if outcome not in PASSED)
        return TrialResult(
            patch=input.patch,
            solved=verdict.solved,
            reason=verdict.reason,
            seconds=verdict.duration_seconds,
            failed=failed[:_MAX_FAILED],
        )

    async def _graded(self, task: TaskRow, diff: bytes, input: TrialInput) -> Verdict:
        info = activity.info()
        assert info.workflow_id is not None
        user = f"admit:{task.id}:{input.patch}:{input.repeat}"
        async with self.database.begin() as connection:
            left = await sandboxes.sandboxes_of_user(
                connection, info.workflow_id, user
            )  # boxes of earlier tries of this trial
        await kill_and_record(self.database, self.provider, left)
        values = {
            "provider": self.provider.name,
            "role": SandboxRole.GRADE,
            "rollout_id": None,
            "attempt": 0,
            "image": task.image,
        }
        async with self.database.begin() as connection:
            row = await sandboxes.reserve_sandbox(
                connection,
                {**values, "workflow_id": info.workflow_id, "used_by": user},
                RunConfig.model_fields["sandbox"].default.max_boxes,
            )
        if row is None:
            raise SandboxBusyError("all boxes are taken", retry_after_seconds=5)
        seconds = int(input.eval_seconds + input.workspace_seconds + _BOX_MARGIN_SECONDS)
        try:
            box = await self.provider.create(
                task.image,
                ttl_seconds=min(seconds, self.provider.capabilities.max_ttl_seconds),
                metadata={INSTALLATION_KEY: str(self.installation), UUID_KEY: str(row.uuid)},
                idempotency_key=str(row.uuid),
                network=False,
            )
        except (
            ConfigError
        ):  # an image that is not there: its room must not stay taken for as long as the admission runs
            await kill_and_record(self.database, self.provider, [row])
            raise
        async with self.database.begin() as connection:
            await sandboxes.set_sandbox_live(connection, row.id, box.id)
        try:
            limits = {"eval_seconds": input.eval_seconds, "workspace_seconds": input.workspace_seconds}
            config = RunConfig.model_validate({"datasets": [{"path": task.label}], "limits": limits})
            verdict, _ = await judge_patch(box, grader_of(GRADERS, task.grader), task, None, diff, config)
        finally:
            await box.close()
            await try_kill_box(self.database, self.provider, row.id, box.id)
        return verdict

    @activity_stage("record_admission")
    async def record_admission(self, input: AdmissionInput) -> AdmissionResult:
        """Decides and stores, with the evidence; the newest result of a grader version replaces the one before."""
        async with self.database.begin() as connection:
            task = await tasks.get_task(connection, input.task_id)
            grader: Grader = grader_of(GRADERS, task.grader)
            decided = decide_admission(input.trials)
            gold = [trial.seconds for trial in input.trials if trial.patch == "gold" and not trial.error]
            await admissions.store_admission(
                connection,
                {
                    "task_id": input.task_id,
                    "grader": grader.name,
                    "grader_version": grader.version,
                    "admitted": decided.admitted,
                    "reason": decided.reason,
                    "evidence": [trial.model_dump() for trial in input.trials],
                    "gold_seconds": median(gold) if gold else None,
                },
            )
        return decided


def grader_versions() -> list[tuple[str, str]]:
    return [(grader.name, grader.version) for grader in GRADERS.values()]


def decide_admission(trials: list[TrialResult]) -> AdmissionResult:
    """Admitted: every gold trial solved, no empty one; anything else is a quarantine with its reason in words."""
    gold, empty = ([trial for trial in trials if trial.patch == kind] for kind in ("gold", "empty"))
    error = next((trial for trial in trials if trial.error), None)
    if error is not None:
        return AdmissionResult(admitted=False, reason=f"the {error.patch} patch got no verdict: {error.error}")
    if not gold or not empty:
        return AdmissionResult(admitted=False, reason="both patches have to be tried")
    passed, held = sum(trial.solved for trial in gold), sum(not trial.solved for trial in empty)
    if passed == len(gold) and held == len(empty):
        return AdmissionResult(admitted=True, reason="")
    words = []
    if passed < len(gold):
        first = next(trial for trial in gold if not trial.solved)
        words.append(
            f"the gold patch passed {passed} of {len(gold)} times ({'flaky: ' if passed else ''}{first.reason})"
        )
    if held < len(empty):
        words.append(f"the empty patch failed {held} of {len(empty)} times{' (flaky)' if held else ''}")
    return AdmissionResult(admitted=False, reason="; ".join(words))
