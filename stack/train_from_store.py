"""Train a run on the groups that another run left in the store: no rollouts, no workflow, no engine.

Two losses can only be compared on the same data. The run's row, its version 0 and all its plan rows are written in one
transaction, so a crash leaves a complete run or none. The learner then works as in any run, with the same guarantees,
and ends the run with the last checkpoint.
"""

import asyncio
from pathlib import Path
from typing import Any

from activities.run_creation import model_directory, publish_model
from engine.policy_files import file_sha256
from ratchet.config import RunConfig
from ratchet.errors import ConfigError, StoreUnavailableError
from ratchet.progress import ReportProgress
from ratchet.types import RunState, policy_version
from stack.follow_run import collect_result, new_run_id
from stack.parts import Stack
from store import learners, open_runs, retention, runs
from store.database import Database
from store.runs import RunRow
from training import planner
from training.rollout_dumps import wait_for_dumps

_LOOK_SECONDS = 1.0
_TOKENIZER = "tokenizer.json"


async def create_stored_run(database: Database, run_id: str, source_run_id: str, config: RunConfig, name: str) -> int:
    """Return how many steps the stored groups suffice for, up to `training.steps`. Raises ConfigError if 0."""
    async with database.begin() as connection:
        source = await runs.get_run(connection, source_run_id)
    model = await model_directory(database, config)
    if source is None:
        raise ConfigError(
            f"--from-store: run {source_run_id!r} does not exist; `ratchet show runs` lists those that do"
        )
    answered = source.resolved_config
    if not answered.uses_model:
        raise ConfigError(
            f"--from-store: run {source_run_id} was answered by an endpoint, whose tokens are not captured; evaluate "
            "it with --tokens and a config that names the local `model`"
        )
    if answered.endpoint is not None and (config.loss.preset != "sft" or config.loss.reference_kl):
        raise ConfigError(
            f"--from-store: run {source_run_id} was answered by an endpoint, whose logprobs are not known: "
            f"loss.preset must be sft, found {config.loss.preset}, and loss.reference_kl 0, found "
            f"{config.loss.reference_kl:g}"
        )
    _require_same_tokenizer(Path(source.model_path), model, source_run_id)
    first = await asyncio.to_thread(publish_model, model, run_id, config.training.weights_address)
    async with database.begin() as connection:
        await retention.require_turns(connection, source_run_id)
        await runs.create_run(connection, runs.NewRun.of_config(run_id, name, config, model, source_run_id))
        await runs.publish_initial(connection, policy_version(run_id, 0, 0), run_id, first.uri, first.files)
        demonstrations = answered.endpoint is not None
        num_steps = await planner.plan_stored(connection, run_id, source_run_id, config, demonstrations)
        if num_steps == 0:
            condition = "a solved rollout" if demonstrations else "graded, with differing rewards"
            raise ConfigError(
                f"--from-store: run {source_run_id} has no group to train on ({condition} and trainable tokens)"
            )
        planned = config.model_copy(update={"training": config.training.model_copy(update={"steps": num_steps})})
        await runs.set_run_config(connection, run_id, planned.model_dump(mode="json"))
    return num_steps


def _require_same_tokenizer(stored: Path, model: Path, source_run_id: str) -> None:
    """Raise ConfigError if the model's tokenizer is not that of the stored ids; unchecked if files are missing."""
    files = [directory / _TOKENIZER for directory in (stored, model)]
    if all(file.is_file() for file in files):
        one, other = (file_sha256(file) for file in files)
        if one != other:
            raise ConfigError(
                f"--from-store: {model} has another tokenizer than run {source_run_id} was recorded with ({stored})"
            )


async def watch_stored_run(database: Database, run_id: str, say: ReportProgress) -> RunRow:
    """Report each step until the run has ended or is paused, and return its row."""
    line = ""
    while True:
        try:
            async with database.begin() as connection:
                row, learner = await runs.get_run(connection, run_id), await learners.get_learner(connection, run_id)
        except StoreUnavailableError:
            row = learner = None
        if row is not None:
            if row.state != RunState.RUNNING:
                return row
            now = f"step {row.step}: {learner.phase if learner else 'waiting for the learner'}"
            if now != line:
                say(now)
                line = now
        await asyncio.sleep(_LOOK_SECONDS)


async def start_stored_run(
    stack: Stack, config: RunConfig, name: str, source_run_id: str, new: bool, say: ReportProgress
) -> str:
    """Return the newest unfinished run of this config on that source, or a new one."""
    async with stack.database() as database:
        async with database.begin() as connection:
            unfinished = None if new else await runs.newest_unfinished_run(connection, config, source_run_id)
            reason = await open_runs.resume_run(connection, unfinished) if unfinished is not None else None
        if unfinished is not None:
            paused = f"; it was paused: {reason}" if reason else ""
            say(f"continuing run {unfinished} (same config, same stored groups; --new starts another){paused}")
            return unfinished
        run_id = new_run_id(name)
        num_steps = await create_stored_run(database, run_id, source_run_id, config, name)
        say(f"run {run_id}: {num_steps} steps on the stored groups of {source_run_id}")
        return run_id


async def follow_stored_run(stack: Stack, run_id: str, say: ReportProgress) -> dict[str, Any]:
    """Report the run's progress until it has ended or is paused, and return its steps and evaluations."""
    async with stack.database() as database:
        row = await watch_stored_run(database, run_id, say)
    if row.state != RunState.PAUSED:
        await wait_for_dumps(run_id, say)
    if row.state != RunState.DONE:
        say(f"run {run_id} is {row.state}: {row.state_reason}")
    return await collect_result(stack, run_id)
