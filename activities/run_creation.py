"""Create a run, for training or for rollouts by hand: validate its config, import its tasks, write its rows."""

import asyncio
import random
import shutil
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.dataset_import import import_dataset, offers_of, usable_task_ids
from activities.datasets.formats import dataset_digest
from activities.run_checks import check_run
from adapter.endpoint import check_endpoint
from engine import weight_storage
from engine.policy_cache import PolicyCache
from engine.policy_files import link_version
from ratchet import paths
from ratchet.config import TINY_POLICIES, RunConfig
from ratchet.errors import ConfigError, StoreUnavailableError
from ratchet.lora_slots import FIRST_SLOT
from ratchet.model_directory import model_of, read_chat_template, read_model_json, require_model
from ratchet.run_names import newest_steps, step_number
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import JsonObject, Purpose, policy_version
from store import forks, open_runs, runs
from store.database import Database
from store.runs import NewRun, OrderedTask
from training import planner


class InitialVersion(NamedTuple):
    """The URI of a run's version 0, and the description of its files."""

    uri: str
    files: list[JsonObject]


async def create_run_from_config(
    database: Database, settings: TemporalSettings, run_id: str, config: RunConfig, name: str
) -> None:
    """Create the run with its task order and its policy version of step 0. Safe to repeat.

    `name`: the config's name, or `runs.ADHOC`. Raises ConfigError or DatasetError before anything is written, and
    ConfigError if the engines of its set cannot serve it beside another open run.
    """
    await asyncio.to_thread(check_run, config, settings)
    if name != runs.ADHOC:
        await database.run(open_runs.require_slot, run_id, config)
    model = await model_directory(database, config) if config.uses_model else None
    if config.endpoint is not None:
        evaluated = config.evaluation
        await check_endpoint(config.endpoint, [*evaluated.temperatures, *evaluated.start_temperatures])
        first = InitialVersion(config.endpoint.url, [])
    else:
        assert model is not None
        # No engine reads the version of rollouts by hand, which the engines answer with what they have.
        address = None if name == runs.ADHOC else config.training.weights_address
        first = await asyncio.to_thread(publish_model, model, run_id, address)
    try:
        async with database.begin() as connection:
            order = await _import_tasks(connection, config, model)
            slot = FIRST_SLOT
            if name != runs.ADHOC:
                slot = await open_runs.require_slot(connection, run_id, config, first.files)
            new = NewRun.of_config(run_id, name, config, model, lora_slot=slot)
            if await runs.create_run(connection, new) and config.retrain and name != runs.ADHOC:
                await planner.plan_again(connection, run_id, config)
            for purpose, ordered in order.items():
                await runs.set_task_order(connection, run_id, purpose, ordered)
            await runs.publish_initial(connection, policy_version(run_id, 0, 0), run_id, *first)
    except StoreUnavailableError:
        raise  # the run may have been created all the same, and this is tried again
    except Exception:
        await _discard_version(database, run_id, first)
        raise


async def _discard_version(database: Database, run_id: str, version: InitialVersion) -> None:
    """Delete the files of the version 0 of a run that is refused, unless an earlier try has created the run."""
    if not version.files or await database.run(runs.get_run, run_id) is not None:
        return
    directory = paths.policies() / policy_version(run_id, 0, 0)
    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    if version.uri != str(directory):
        await asyncio.to_thread(weight_storage.delete_version, version.uri)


def publish_model(model: Path, run_id: str, address: str | None) -> InitialVersion:
    """Make the files of the run's version 0 and store them at `address`, if there is one. Safe to repeat.

    Raises ConfigError if the model is an adapter, WeightStorageError if the address does not answer.
    """
    version = policy_version(run_id, 0, 0)
    directory = paths.policies() / version
    files = link_version(model, directory)
    if address is None:
        return InitialVersion(str(directory), files)
    uri = weight_storage.version_address(address, version)
    weight_storage.upload_version(directory, uri, files)
    return InitialVersion(uri, files)


async def model_directory(database: Database, config: RunConfig) -> Path:
    """Return the directory of the run's initial weights, fetched from their address if they are not here. Raises
    ConfigError naming what is missing, WeightStorageError if an address does not answer."""
    if config.init_from is not None and "@" in config.init_from and not Path(config.init_from).exists():
        run_id, _, step = config.init_from.rpartition("@")
        number = step_number(step)
        async with database.begin() as connection:
            version = None if number is None else await runs.newest_version(connection, run_id, number)
            steps = [] if version else await runs.published_steps(connection, run_id)
        if version is None:
            there = newest_steps(steps) or f"there is none of a run {run_id!r}"
            raise ConfigError(
                f"init_from: {config.init_from!r} names no published step; {there}. Expected a directory or RUN@step"
            )
        if not version.files:
            raise ConfigError(f"init_from: run {run_id} was answered by {version.uri}, so it has no weights")
        with PolicyCache(paths.policies()) as cache:
            return await asyncio.to_thread(cache.fetch, version.uri, version.files)
    model = Path(config.init_from) if config.init_from else model_of(config)
    if config.model in TINY_POLICIES and config.init_from is None and not model.exists():
        raise ConfigError(
            f"model: {model} does not exist; make it with `ratchet models tiny-policy --name {config.model}`"
        )
    await asyncio.to_thread(require_model, model)
    return model


def _tokenizer_or_template_differs(model: Path, source: Path) -> bool:
    """Compare vocabularies and chat templates; a source that is gone differs from nothing."""
    if not (source / "tokenizer.json").exists():
        return False
    if read_chat_template(model) != read_chat_template(source):
        return True
    one, other = (read_model_json(directory, "tokenizer.json") for directory in (model, source))
    return any(one.get(part) != other.get(part) for part in ("model", "added_tokens"))


async def _import_tasks(
    connection: AsyncConnection, config: RunConfig, model: Path | None
) -> dict[Purpose, list[OrderedTask]]:
    """Import every dataset. Training tasks are shuffled by the run's seed, held-out tasks keep their file's order.

    A run of forks has only the task that it is forked from. Raises ConfigError if its `model` has another tokenizer
    or chat template than the model whose tokens it is to go on from.
    """
    order: dict[Purpose, list[OrderedTask]] = {Purpose.TRAIN: [], Purpose.EVAL: []}
    if config.evaluation.forked_turn_id is not None:
        point = await forks.fork_point(connection, config.evaluation.forked_turn_id)
        source = Path((await runs.the_run(connection, point.run_id)).model_path)
        if model is not None and await asyncio.to_thread(_tokenizer_or_template_differs, model, source):
            raise ConfigError(
                f"{model} has another tokenizer or template than {source}, whose tokens rollout {point.rollout_id} "
                "has; name a policy with the same ones"
            )
        return order | {Purpose.EVAL: [OrderedTask(point.task_id, 0)]}
    for number, dataset in enumerate(config.datasets):
        digest = await asyncio.to_thread(dataset_digest, dataset)
        await import_dataset(connection, dataset, digest, offers_of(config))
        usable = await usable_task_ids(connection, dataset, digest, config)
        order[Purpose(dataset.use)] += [OrderedTask(task_id, number) for task_id in usable]
    random.Random(f"{config.seed}/task order").shuffle(order[Purpose.TRAIN])
    return order
