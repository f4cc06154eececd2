"""Evaluate a config, a step of a run, a model directory or an endpoint, and compare two evaluations.

An open run is evaluated by itself, at its next step boundary. Anything else becomes a run of zero steps, which the same
workflow prepares, pauses, resumes and ends; so an evaluation that is cut goes on, and runs only what has no verdict.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from client.steering import wake_run
from ratchet.config import RunConfig
from ratchet.config_sources import load_config, resolve_config
from ratchet.errors import ConfigError, StoreUnavailableError
from ratchet.progress import ReportProgress
from ratchet.run_names import newest_steps, plain_name, step_number
from ratchet.solve_rates import compare
from ratchet.stored_config import read_stored_config
from ratchet.types import CHAT, OPEN_STATES, JsonObject, RunState
from reads.evaluation_report import evaluated_tasks, find_evaluation, report_evaluation
from reads.evaluations import evaluation_rates
from reads.runs import shown_endpoint
from stack.follow_run import start_run, watch_run
from stack.parts import Stack
from stack.startup import bring_up, require_up
from store import evaluations, forks, runs
from store.forks import ForkPoint
from store.names import Kind, require_named
from store.runs import RunRow
from store.steering import Request

_POLL_SECONDS = 1.0


@dataclass(slots=True, frozen=True)
class EvaluationSettings:
    """The subject and settings of an evaluation. `config`: gives tasks, harness and limits for a model directory or an
    endpoint. `datasets`: replace the config's. `new`: do not continue an unfinished evaluation of equal settings.

    `model`, `key`, `body`, `tokens`: of an endpoint, see `EndpointConfig`. `engine_set`: instead of the config's; an
    open run is evaluated by its own. `forked_turn_id`: a turn before which each rollout begins.
    """

    temperatures: tuple[float, ...] = (1.0,)
    samples: int = 1
    config: Path | None = None
    datasets: tuple[Path, ...] = ()
    new: bool = False
    model: str | None = None
    key: str | None = None
    body: JsonObject = field(default_factory=dict)
    engine_set: str | None = None
    tokens: bool = False
    forked_turn_id: int | None = None


async def run_evaluation(
    stack: Stack, what: str, settings: EvaluationSettings, by: str, say: ReportProgress
) -> JsonObject:
    """Evaluate and return the run's id and a report per evaluation.

    Raises ConfigError if `what` is none of the four, cannot be evaluated now, or if the run is paused meanwhile.
    """
    if what.startswith(("http://", "https://")) and plain_name(what) == what:  # not a link to a run's page
        return await _evaluate_config(stack, endpoint_config(what, settings), str(settings.model), settings, say)
    if settings.model is not None or settings.key is not None or settings.body or settings.tokens:
        raise ConfigError(f"--model, --key, --body, --tokens are those of an endpoint, and {what} is no http address")
    path = Path(what)
    if path.is_file():
        return await _evaluate_config(stack, load_config(path), path.stem, settings, say)
    if (path / "config.json").is_file():
        if settings.config is None:
            raise ConfigError(f"{what} is a model directory: name the config with its tasks and agent by --config")
        config = load_config(settings.config, [f"model={path.resolve()}", "endpoint=null"])
        return await _evaluate_config(stack, config, path.resolve().name, settings, say)
    name = plain_name(what)
    run_id, _, step = name.rpartition("@") if "@" in name else (name, "", "")
    async with stack.database() as database, database.begin() as connection:
        row = await runs.get_run(connection, run_id)
    number = step_number(step)
    if row is None or (step and number is None):
        raise ConfigError(f"{what!r} is no config file, no run, no RUN@STEP, no model directory and no http address")
    if row.state in OPEN_STATES:
        if step:  # the run may have trained another step by the time that it is evaluated
            raise ConfigError(
                f"run {run_id} is open at step {row.step}, and the engines serve one policy at a time: "
                f"`ratchet evaluate {run_id}` evaluates it at its next step boundary, or wait for its end"
            )
        if settings.datasets or settings.config is not None or settings.engine_set is not None:
            raise ConfigError(
                f"run {run_id} is open, and is evaluated with its own held-out tasks and engines: leave --dataset, "
                "--config and --engine-set out, or wait for its end"
            )
        return await _evaluate_open_run(stack, row, settings, by, say)
    config = read_stored_config(row.config)
    if number is not None and config.endpoint is None:
        await _require_published(stack, run_id, number)
    if config.endpoint is None:
        config = config.model_copy(update={"init_from": f"{run_id}@{step or row.step}"})
    return await _evaluate_config(stack, config, f"{run_id}-step{step or row.step}", settings, say)


async def run_fork(
    stack: Stack, what: str, number: int, policy: str | None, settings: EvaluationSettings, say: ReportProgress
) -> JsonObject:
    """Let rollouts do again what one did before its turn `number`, and sample from there; return their report.

    It has `whole`, the number of rollouts that have done all of it again. Raises what `fork_config` raises.
    """
    config, point = await fork_config(stack, what, number, policy, settings)
    found = await _start(stack, config, f"fork-{point.rollout_id}-{number}", settings.new, say)
    async with stack.database() as database, database.begin() as connection:
        made = [one for one in await forks.forks_of(connection, point.rollout_id) if one.run_id == found["run_id"]]
    return found | {"whole": sum(one.num_whole for one in made), "rollouts": sum(one.size for one in made)}


async def fork_config(
    stack: Stack, what: str, number: int, policy: str | None, settings: EvaluationSettings
) -> tuple[RunConfig, ForkPoint]:
    """Return the config of the run that forks a rollout at its turn `number`, from 1.

    `policy`: RUN@STEP or a model directory with the same tokenizer; None: what sampled the turn. It samples at the
    turn's temperature, at 1 if that was 0. Raises ConfigError if there is no such turn or no weights for it.
    """
    async with stack.database() as database, database.begin() as connection:
        rollout = await require_named(connection, what, Kind.ROLLOUT)
        point = await forks.fork_point(connection, await forks.turn_of_number(connection, rollout.id, number))
        row = await runs.the_run(connection, point.run_id)
    init_from = policy or point.policy
    if init_from is None:
        raise ConfigError(f"no stored policy sampled turn {number} of rollout {rollout.id}: name one by --policy")
    if row.resolved_config.harness.generate == CHAT:
        raise ConfigError(f"rollout {rollout.id} is a chat, which needs a person: `ratchet chat` begins another one")
    run_id, _, step = plain_name(init_from).rpartition("@")
    if run_id and not Path(init_from).exists() and (wanted := step_number(step)) is not None:
        await _require_published(stack, run_id, wanted)
    config = read_stored_config(row.config).model_copy(update={"endpoint": None, "init_from": init_from})
    forked = replace(settings, temperatures=(point.temperature or 1.0,), forked_turn_id=point.id)
    return evaluation_config(config, forked), point


async def _require_published(stack: Stack, run_id: str, step: int) -> None:
    """Raise ConfigError if the weights of a step are not there any more, before anything is started for it."""
    async with stack.database() as database, database.begin() as connection:
        if await runs.newest_version(connection, run_id, step) is not None:
            return
        steps = await runs.published_steps(connection, run_id)
    there = newest_steps(steps) or "it has none"
    raise ConfigError(f"run {run_id} has no weights of step {step}; {there} (training.kept_versions)")


def endpoint_config(url: str, settings: EvaluationSettings) -> RunConfig:
    """Return the config of `--config` with this endpoint. Raises ConfigError if something is missing."""
    if settings.config is None:
        raise ConfigError(f"{url} is an endpoint: name the config with its tasks and agent by --config")
    if settings.model is None:
        raise ConfigError(f"{url} is an endpoint: name the model that it should answer with by --model")
    values = load_config(settings.config).model_dump(mode="json")
    values["endpoint"] = {name: getattr(settings, name) for name in ("model", "key", "body", "tokens")} | {"url": url}
    values["training"] |= {"steps": 0}
    return resolve_config(values, "the evaluation's config", Path.cwd())


async def _evaluate_config(
    stack: Stack, config: RunConfig, name: str, settings: EvaluationSettings, say: ReportProgress
) -> JsonObject:
    return await _start(stack, evaluation_config(config, settings), f"evaluate-{name}", settings.new, say)


async def _start(stack: Stack, wanted: RunConfig, name: str, new: bool, say: ReportProgress) -> JsonObject:
    await asyncio.to_thread(bring_up, stack, wanted, say, for_run=True)
    run_id = await start_run(stack, wanted, name, new, say)
    await watch_run(stack, run_id, say)
    return await read_reports(stack, run_id)


def evaluation_config(config: RunConfig, settings: EvaluationSettings) -> RunConfig:
    """Return the config of a run that only evaluates: its held-out tasks, or all tasks if none are held out."""
    values: dict[str, Any] = config.model_dump(mode="json")
    if settings.datasets:
        values["datasets"] = [{"path": str(path.resolve())} for path in settings.datasets]
    held_out = [one for one in values["datasets"] if one.get("use") == "eval"]
    values["datasets"] = [{**one, "use": "eval", "weight": None} for one in held_out or values["datasets"]]
    values["training"] |= {"steps": 0}
    values["engine_set"] = settings.engine_set or config.engine_set
    values["evaluation"] = {
        "at": ["start"],
        "temperatures": list(settings.temperatures),
        "samples": settings.samples,
        "forked_turn_id": settings.forked_turn_id,
    }
    return resolve_config(values, "the evaluation's config", Path.cwd())


async def _evaluate_open_run(
    stack: Stack, row: RunRow, settings: EvaluationSettings, by: str, say: ReportProgress
) -> JsonObject:
    request_id = uuid4().hex
    async with stack.database() as database:
        async with database.begin() as connection:
            asked = [
                (
                    await evaluations.ask_evaluation(
                        connection,
                        Request(row.run_id, f"{request_id}/{temperature}", by),
                        temperature,
                        settings.samples if temperature > 0 else 1,
                    )
                ).label
                for temperature in settings.temperatures
            ]
        labels = list(dict.fromkeys(asked))  # a temperature that is named twice is evaluated once
        say(f"run {row.run_id} is evaluated at its next step boundary: {', '.join(labels)}")
        await wake_run(stack, row.run_id)
        is_away, line = False, ""
        while True:
            try:
                async with database.begin() as connection:
                    begun = await evaluations.begun_evaluations(connection, row.run_id)
                    found = await runs.get_run(connection, row.run_id)
            except StoreUnavailableError as error:  # the run waits for it, too
                await require_up(stack, f"the evaluation of {row.run_id} goes on")
                if not is_away:
                    say(f"{error}; the evaluation goes on when it does")
                is_away = True
                await asyncio.sleep(_POLL_SECONDS)
                continue
            is_away = False
            assert found is not None
            ended = {one.label for one in begun if one.has_ended}
            if set(labels) <= ended:
                return await read_reports(stack, row.run_id, labels)
            _require_going_on(found, [label for label in labels if label not in {one.label for one in begun}])
            now = f"step {found.step}: {len(set(labels) & ended)} of {len(labels)} evaluations have ended"
            if now != line:
                say(now)
                line = now
            await asyncio.sleep(_POLL_SECONDS)


def _require_going_on(run: RunRow, waiting: Sequence[str]) -> None:
    """Raise ConfigError if the run is over, or if it is paused and evaluations have not begun."""
    if run.state == RunState.PAUSED and waiting:
        raise ConfigError(
            f"run {run.run_id} is paused ({run.state_reason}): {', '.join(waiting)} is kept, "
            f"and begins after `ratchet resume {run.run_id}`"
        )
    if run.state not in OPEN_STATES:
        raise ConfigError(f"run {run.run_id} is {run.state}: {run.state_reason}")


async def read_reports(stack: Stack, run_id: str, labels: Sequence[str] | None = None) -> JsonObject:
    """Return a report per evaluation of a run, of all or of these labels."""
    async with stack.database() as database, database.begin() as connection:
        run = await runs.the_run(connection, run_id)
        endpoint = run.resolved_config.endpoint
        reports = {
            one.label: {
                "step": one.step,
                "temperature": one.temperature,
                "policy_version": one.policy_version,
                **report_evaluation(await evaluated_tasks(connection, run_id, one.label)),
            }
            for one in await evaluation_rates(connection, run_id)
            if labels is None or one.label in labels
        }
    return {
        "run_id": run_id,
        "endpoint": None if endpoint is None else shown_endpoint(endpoint.model_dump()),
        "tokens_captured": run.resolved_config.uses_model,
        "evaluations": reports,
    }


async def compare_evaluations(stack: Stack, first: str, second: str) -> JsonObject:
    """Compare two evaluations (RUN:LABEL, evaluate/RUN/LABEL, or RUN for its newest) on the tasks that both judged.

    Raises ConfigError if one does not exist, or if they have no task in common.
    """
    async with stack.database() as database, database.begin() as connection:
        names: list[str] = []
        counts = []
        for name in (first, second):
            run_id, _, label = re.sub(r"^evaluate/([^/]+)/", r"\1:", plain_name(name)).partition(":")
            found = await find_evaluation(connection, run_id, label or None)
            names.append(f"{run_id}:{found}")
            tasks = await evaluated_tasks(connection, run_id, found)
            counts.append({task.task: task.count for task in tasks})
    result = compare(*counts)
    if not result.difference.num_tasks:
        raise ConfigError(f"{names[0]} and {names[1]} have no task with verdicts in common")
    return {"first": names[0], "second": names[1], **asdict(result)}
