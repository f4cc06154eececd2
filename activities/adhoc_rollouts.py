"""Rollouts that are started by hand with a dataset and a task: find or create their run, and insert their row."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from temporalio import activity

from activities.dataset_import import import_dataset, offers_of
from activities.datasets.formats import dataset_digest
from activities.run_creation import create_run_from_config
from activities.stage import activity_stage
from ratchet.config import RunConfig
from ratchet.config_sources import resolve_config
from ratchet.errors import ConfigError, DatasetError
from ratchet.lora_slots import FIRST_SLOT, version_in_label
from ratchet.model_directory import model_of
from ratchet.payloads import RolloutInput, RolloutRow
from ratchet.stored_config import config_digest
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import JsonObject, Purpose
from store import engines, rollouts, runs, tasks
from store.database import Database
from store.engines import EngineRow
from store.rollouts import AdhocRollout
from store.tasks import NumberedTask


class AdhocRolloutActivities:
    """Prepare a rollout that belongs to no group."""

    def __init__(self, database: Database, settings: TemporalSettings) -> None:
        self.database = database
        self.settings = settings

    @activity_stage("prepare_rollout")
    async def prepare_rollout(self, input: RolloutInput) -> RolloutRow:
        """Insert the rollout's row, in a run `adhoc-…` per config. Safe to repeat by workflow id. Raises ConfigError or
        DatasetError for a wrong config, model, policy version, dataset or task."""
        workflow_id = activity.info().workflow_id
        assert workflow_id is not None
        config = _config_of(input)
        run_id = self.settings.own(f"{runs.ADHOC}-{config_digest(config)[:8]}")
        async with self.database.begin() as connection:
            exists = await runs.get_run(connection, run_id)
            _require_served(input, config, await engines.list_engines(connection, config.engine_set))
        if exists is None:
            await create_run_from_config(self.database, self.settings, run_id, config, runs.ADHOC)
        digest = await asyncio.to_thread(dataset_digest, config.datasets[0])
        async with self.database.begin() as connection:
            known = await tasks.tasks_of_dataset(connection, digest)
            if not known:  # the file has changed since the run was created
                await import_dataset(connection, config.datasets[0], digest, offers_of(config))
                known = await tasks.tasks_of_dataset(connection, digest)
            task = _find_task(known, input)
            new = AdhocRollout(
                run_id=run_id,
                task_id=task.task_id,
                member=0,
                purpose=Purpose.EVAL,
                workflow_id=workflow_id,
                harness=config.harness.generate or config.harness.name,
                temperature=config.sampling.temperature,
                policy_version=input.policy_version,
            )
            rollout_id = await rollouts.create_adhoc_rollout(connection, new)
        label = task.label or str(task.row_no)
        return RolloutRow(rollout_id=rollout_id, run_id=run_id, task=label, harness=new.harness)


def _config_of(input: RolloutInput) -> RunConfig:
    """Return the config with the input's dataset, model and harness. Admission is ignored: the task was named."""
    assert input.dataset is not None and input.task is not None, "checked by RolloutInput"
    values: JsonObject = input.config or {}
    known = [one for one in values.get("datasets") or [] if isinstance(one, dict) and one.get("path") == input.dataset]
    dataset = {**(known[0] if known else {}), "path": input.dataset, "use": "train", "weight": None, "limit": None}
    values = {**values, "datasets": [dataset]}
    values |= {"model": input.model} if input.model else {}
    values |= {"harness": {"name": input.harness}} if input.harness else {}
    values["grading"] = {**(values.get("grading") or {}), "admission": "ignored"}
    return resolve_config(values, "Rollout input", Path.cwd())


def _find_task(rows: Sequence[NumberedTask], input: RolloutInput) -> NumberedTask:
    for row in rows:
        if input.task in (row.label, row.row_no) or (
            isinstance(input.task, str) and input.task.isdigit() and int(input.task) == row.row_no
        ):
            return row
    raise DatasetError(
        f"{input.dataset}: no task {input.task!r}; give a row's label, or its number from 0 to {len(rows) - 1}"
    )


def _require_served(input: RolloutInput, config: RunConfig, found: Sequence[EngineRow]) -> None:
    """Raise ConfigError if the input names a model or a policy version that no engine serves."""
    model = input.model and str(model_of(config).resolve())
    models = {str(Path(engine.model_path).resolve()) for engine in found}
    versions = {version_in_label(engine.version, FIRST_SLOT) for engine in found}  # which rollouts by hand ask
    for what, wanted, served in (("model", model, models), ("policy version", input.policy_version, versions)):
        if wanted and found and wanted not in served:
            names = ", ".join(sorted(str(name) for name in served))
            raise ConfigError(
                f"{what} {wanted} is not served; the engines of set {config.engine_set} serve {names} "
                "(`ratchet up CONFIG` starts them on a config's model)"
            )
