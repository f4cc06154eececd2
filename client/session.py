"""The classes `Client` and `Run`: every question about runs and every request to them, as blocking calls.

They work in notebooks, too, whose event loop is busy: a call then runs on a loop of its own in another thread.
"""

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints
from zlib import crc32

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.dataset_import import import_dataset, offers_of
from activities.datasets.formats import dataset_digest
from client import evaluating, steering
from client.evaluating import EvaluationSettings
from client.read_only_sql import NoReaderError, SqlResult, read_sql, read_sql_as_reader
from client.workflows import run_workflow
from ratchet.bounded_numbers import ADVICE_STEPS, LARGEST_INTEGER
from ratchet.config import RunConfig
from ratchet.config_sources import load_config, resolve_config
from ratchet.errors import ConfigError, MachineError, StoreUnavailableError
from ratchet.grading_payloads import RegradeInput, RegradeResult
from ratchet.progress import ReportProgress
from ratchet.run_names import refuse_link_to_number, require_run_id
from ratchet.steering import with_values
from ratchet.stored_config import read_stored_config
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import OPEN_STATES, JsonObject, SteeringAction
from reads.advice import Advice, advise_run
from reads.curves import StepTimes, metrics_by_step, times_by_step
from reads.evaluations import EvaluationRate, evaluation_rates
from reads.groups import ListedGroup, list_groups, read_group_filter
from reads.reader_role import ReadOnlyStore
from reads.recall import Recall, read_extent, read_recall, retrained_runs
from reads.rollout_list import RolloutFilter, RolloutLine, list_rollout_lines
from reads.rollouts import describe_rollout
from reads.run_times import read_run_times
from reads.runs import RolloutCount, RunSummary, count_rollouts, list_run_summaries, require_run
from reads.steering import SteeringLine, list_requests
from stack.follow_run import collect_result, start_run, watch_run
from stack.parts import Stack
from stack.run_status import Diagnosis, diagnose
from stack.startup import connect_stack
from store import runs, step_mix
from store.names import Kind, Named, require_named
from store.runs import RunRow
from store.steering import SteeringAnswer
from store.tasks import count_mended

_T = TypeVar("_T")


def _silent(line: str) -> None:
    del line


def run_blocking(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end. Raises MachineError if the store does not answer."""
    try:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, work).result()
    except StoreUnavailableError as error:
        raise MachineError(f"{error}; start the stack with `ratchet up`") from None


class Rows(list[JsonObject]):
    """Rows of one report, in the order of the report. `kinds`: the dataclasses whose fields each row has."""

    def __init__(self, rows: Iterable[JsonObject], *kinds: type) -> None:
        super().__init__(rows)
        self._kinds = kinds

    def frame(self) -> Any:
        """Return the rows as a data frame, typed also if there are none. Raises MachineError without pandas."""
        try:
            import pandas
        except ImportError:
            raise MachineError("pandas is not installed, which data frames need: `pip install pandas`") from None
        example = {name: _example(hint) for kind in self._kinds for name, hint in get_type_hints(kind).items()}
        return pandas.DataFrame(list(self) or [example])[: len(self)]


def _example(hint: Any) -> Any:
    """Return a value of the type of a field, from which pandas takes the type of the column."""
    kinds = get_args(hint) or (hint,)
    if int in kinds and NoneType in kinds:
        return 0.0  # pandas holds integers of which some are missing as floats
    if datetime in kinds:
        return datetime.now(UTC)
    return next((kind() for kind in (bool, int, float) if kind in kinds), "" if issubclass(kinds[0], str) else None)


def _new_run(row: RunRow, fault: JsonObject, after: str) -> str:
    """Return the name of the run that a recall of a fault in the run `after` starts."""
    return f"{row.config_name}-recall-{crc32(repr(fault | {'run_id': after}).encode()):08x}"


def _recall_command(run_id: str, fault: JsonObject) -> str:
    """Return the command that recalls a fault in this run."""
    words = [word for key in ("task", "family", "grader") if fault[key] for word in (f"--{key}", fault[key])]
    words += [word for one in fault["rollout_ids"] for word in ("--rollout", str(one))]
    words += ["--since", f"{fault['since']:%Y-%m-%dT%H:%M:%S%z}"] if fault["since"] else []
    return shlex.join(["ratchet", "recall", run_id, *words])


class Client:
    """The runs of one stack, by default that of the present directory.

    `by`: who asks, for the audit of what people change; the default is `user@host` of this process.
    """

    def __init__(self, home: Path | str | None = None, by: str | None = None) -> None:
        self.stack = Stack(Path(home) if home is not None else None)
        self.by = by or steering.who_asks()

    def read(self, query: Callable[[AsyncConnection], Awaitable[_T]]) -> _T:
        """Run a query of `store` in a transaction. Raises MachineError if the store does not answer."""

        async def run() -> _T:
            async with self.stack.database() as database, database.begin() as connection:
                return await query(connection)

        return run_blocking(run())

    def runs(self) -> Rows:
        """Return every run with its progress, newest first."""

        async def read(connection: AsyncConnection) -> list[JsonObject]:
            counts = await count_rollouts(connection)
            runs = await list_run_summaries(connection)
            return [asdict(one) | asdict(counts.get(one.run_id, RolloutCount())) for one in runs]

        return Rows(self.read(read), RunSummary, RolloutCount)

    def sql(self, query: str) -> SqlResult:
        """Run one SELECT statement of Postgres, as a role that can only read and for at most 4 seconds.

        If there is no login of a reader, it runs with the stack's own in a transaction that cannot write."""
        url = self.stack.environment()["RATCHET_DATABASE_URL"]

        async def read() -> SqlResult:
            try:
                return await read_sql_as_reader(url, query)
            except NoReaderError:
                async with ReadOnlyStore(url, 1, is_patient=True) as store, store.read() as connection:
                    return await read_sql(connection, query)

        return run_blocking(read())

    def find(self, name: str | int, *kinds: Kind) -> Named:
        """Return the thing of one of these kinds that has this name (`store.names`). Raises ConfigError."""
        return self.read(lambda connection: require_named(connection, str(name), *kinds))

    def run(self, run_id: str | None = None) -> "Run":
        """Return a run; without a name the newest open one, else the newest. Raises ConfigError if there is none."""
        if run_id:
            require_run_id(run_id)  # before the store is asked
        return Run(self, self.read(lambda connection: require_run(connection, run_id)).run_id)

    def train(
        self,
        config: Path | str | Mapping[str, Any] | RunConfig,
        name: str = "run",
        new: bool = False,
        set: Sequence[str] = (),
        say: ReportProgress = _silent,
    ) -> "Run":
        """Start a run on the stack, which must be up, or continue the unfinished one with the same config.

        `config`: a YAML file, whose name then replaces `name`, or the values. `set`: KEY=VALUE overrides of a file.

        It returns when the run is accepted, at most a minute after its start. Raises ConfigError for values that cannot
        be used and for a run that is refused; one that is refused later, because its weights take long to read, raises
        in `Run.wait`.
        """
        if isinstance(config, Path | str):
            path = Path(config)
            resolved, name = load_config(path, set), path.stem
        elif set:
            raise ConfigError(f"set={list(set)!r} overrides a file; change the values that you pass instead")
        else:
            values = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
            resolved = resolve_config(values, "the config", Path.cwd())

        async def start() -> str:
            await connect_stack(self.stack, load_temporal_settings())  # refuses at once if the stack is stopped
            return await start_run(self.stack, resolved, name, new, say)

        return Run(self, run_blocking(start()))

    def evaluate(
        self,
        what: Path | str,
        temperatures: Sequence[float] = (1.0,),
        samples: int = 1,
        config: Path | None = None,
        datasets: Sequence[Path] = (),
        new: bool = False,
        say: ReportProgress = _silent,
        model: str | None = None,
        key: str | None = None,
        body: JsonObject | None = None,
        engine_set: str | None = None,
        tokens: bool = False,
    ) -> JsonObject:
        """Evaluate a config file, RUN, RUN@STEP, or a model directory or an endpoint with `config`, and return a report
        per temperature: pass@k and pass^k, also by dataset and by family.

        An endpoint is an address with OpenAI's Chat Completions; it needs `model`, and `key` is a reference `${NAME}`.
        `tokens`: store its answers as tokens of the config's model, which `ratchet train --from-store` can train.
        `engine_set`: instead of the config's, so that it runs beside another open run.
        """
        of_endpoint = (model, key, dict(body or {}))
        settings = EvaluationSettings(
            tuple(temperatures), samples, config, tuple(datasets), new, *of_endpoint, engine_set, tokens
        )
        return run_blocking(evaluating.run_evaluation(self.stack, str(what), settings, self.by, say))

    def fork(
        self,
        rollout: str | int,
        turn: int,
        policy: str | None = None,
        samples: int = 8,
        engine_set: str | None = None,
        say: ReportProgress = _silent,
    ) -> JsonObject:
        """Let `samples` rollouts do again what a rollout did before its turn `turn`, counted from 1, and sample from
        there; return their report.

        `policy`: RUN@STEP or a model directory with the same tokenizer; by default what sampled the turn. `engine_set`:
        as for `evaluate`.
        """
        settings = EvaluationSettings(samples=samples, engine_set=engine_set)
        return run_blocking(evaluating.run_fork(self.stack, str(rollout), turn, policy, settings, say))

    def compare(self, first: str, second: str) -> JsonObject:
        """Compare two evaluations, each RUN:LABEL, or RUN for its newest, task by task."""
        return run_blocking(evaluating.compare_evaluations(self.stack, first, second))

    def rollout(self, name: str | int) -> JsonObject:
        """Return all of a rollout except its messages and token arrays."""
        return self.read(lambda connection: describe_rollout(connection, name))

    def cancel(self, what: str | int, reason: str = "") -> SteeringAnswer:
        """Cancel a group (`group/RUN/3`), a rollout (its number or workflow id) or an evaluation.

        Raises ConfigError with the reason of a refusal.
        """
        return run_blocking(steering.steer_target(self.stack, SteeringAction.CANCEL, str(what), self.by, reason))

    def retry(self, what: str | int, stage: str | None = None, reason: str = "") -> SteeringAnswer:
        """Run a rollout, or the members of a group or an evaluation (`evaluate/RUN/start-t1`), again that ended without
        a verdict; or try a pending stage of a rollout now.

        Raises ConfigError with the reason of a refusal.
        """
        if stage is not None:
            return run_blocking(steering.retry_stage(self.stack, str(what), stage, self.by, reason))
        return run_blocking(steering.steer_target(self.stack, SteeringAction.RETRY, str(what), self.by, reason))

    def regrade(
        self,
        what: str | int,
        grader: str | None = None,
        repeats: int = 1,
        adopt: bool = False,
        window: int = 2,
        say: ReportProgress = _silent,
        datasets: Sequence[str] = (),
    ) -> RegradeResult:
        """Grade the stored patches of a run, a group (`group/RUN/3`) or a rollout again, and wait for the verdicts: of
        the workflow of an equal request, if it still runs. `datasets`: digests of those that mend tests.

        Raises ConfigError if there is no such thing.
        """
        name = str(what)
        refuse_link_to_number(name)
        found = self.find(name, Kind.RUN, Kind.GROUP, Kind.ROLLOUT)
        source: JsonObject = {"run_id": found.run_id}
        if found.kind is not Kind.RUN:
            source = {"group": found.name} if found.kind is Kind.GROUP else {"rollout_id": found.id}
        options = {"grader": grader, "repeats": repeats, "adopt": adopt, "window": window, "datasets": datasets}
        wanted = RegradeInput.model_validate({**source, **options})
        workflow_id = f"regrade/{found.id or found.run_id}-{crc32(wanted.model_dump_json().encode()):08x}"
        return run_blocking(run_workflow(self.stack, "Regrade", wanted, workflow_id, RegradeResult, say))


class Run:
    """One run: requests to it, and what the store knows of it."""

    def __init__(self, client: Client, run_id: str) -> None:
        self.client = client
        self.run_id = run_id

    def __repr__(self) -> str:
        return f"Run({self.run_id!r})"

    def _ask(self, action: SteeringAction, reason: str, **more: Any) -> SteeringAnswer:
        client = self.client
        return run_blocking(steering.steer_run(client.stack, action, self.run_id, client.by, reason, **more))

    def pause(self, reason: str = "") -> SteeringAnswer:
        """Start nothing new until the run is resumed; what is in flight goes on."""
        return self._ask(SteeringAction.PAUSE, reason)

    def resume(self, reason: str = "") -> SteeringAnswer:
        """Let a paused, stopped, failed or cancelled run go on, or take back a wish to drain or stop it."""
        return self._ask(SteeringAction.RESUME, reason)

    def skip_step(self, reason: str) -> SteeringAnswer:
        """Discard the batch of the paused run's next step; its groups are never trained on."""
        return self._ask(SteeringAction.SKIP_STEP, reason)

    def drain(self, reason: str = "") -> SteeringAnswer:
        """Start no new groups; the run ends when those in flight are trained, or will never be."""
        return self._ask(SteeringAction.DRAIN, reason)

    def stop(self, reason: str = "", now: bool = False) -> SteeringAnswer:
        """End the run after the step that is planned, with a checkpoint.

        `now`: end an evaluation in progress, too, with the verdicts that it has; without it, the run ends after it.
        """
        answer = self._ask(SteeringAction.STOP, reason)
        client = self.client
        ended = run_blocking(steering.cancel_evaluations(client.stack, self.run_id, client.by, reason)) if now else []
        if not ended:
            return answer
        return SteeringAnswer(f"{answer.text}; evaluations that end with the verdicts they have: {', '.join(ended)}")

    def extend(self, steps: int, reason: str = "") -> SteeringAnswer:
        """Add steps; a run that has ended goes on."""
        return self._ask(SteeringAction.EXTEND, reason, steps=steps)

    def set(self, changes: Mapping[str, Any], reason: str = "") -> SteeringAnswer:
        """Change config values, all or none: `run.set({"training.max_staleness": 2})`."""
        return self._ask(SteeringAction.SET, reason, changes=changes)

    def row(self) -> RunRow:
        """Return the run's row: state, wish, config, step. Raises ConfigError if the run does not exist."""
        return self.client.read(lambda connection: runs.the_run(connection, self.run_id))

    def why(self) -> Diagnosis:
        """Say what the run waits for."""
        return run_blocking(diagnose(self.client.stack, self.run_id))

    def advise(self, num_steps: int = ADVICE_STEPS) -> Advice:
        """Say where the hours of the newest trained steps went, and which setting would change it most."""
        return advise_run(self.client.read(lambda connection: read_run_times(connection, self.run_id, num_steps)))

    def recall(
        self,
        task: str | None = None,
        grader: str | None = None,
        rollouts: Sequence[str] = (),
        since: datetime | None = None,
        family: str | None = None,
    ) -> Recall:
        """Return what wrong verdicts have touched in this run; see `reads.recall.read_recall`. It changes nothing."""
        return self.client.read(lambda found: read_recall(found, self.run_id, task, grader, rollouts, since, family))

    def apply_recall(self, found: Recall, say: ReportProgress = _silent) -> "Run | None":
        """Put right what `recall` has found: import this run's datasets, stop it, grade the touched patches by them,
        and start a run that trains from the last clean weights on. Return that one; None if no step is touched.

        If it is cut, call it again. Raises ConfigError for a run on stored groups, without a patch to grade, for
        mended tasks that are not examined as they were before, and if a patch that had a verdict gets none.
        """
        client, row = self.client, self.row()
        config = read_stored_config(row.config)
        if row.source_run_id:
            raise ConfigError(f"run {self.run_id} sampled nothing: train on run {row.source_run_id} again with --new")
        if not found.to_grade:
            what = f"run {self.run_id} has no patch with such a verdict, so there is nothing to put right"
            raise ConfigError(f"{what}; name another fault, or an earlier --since")
        newest, new = self.run_id, _new_run(row, found.fault, self.run_id)
        while client.read(partial(runs.get_run, run_id=new)) is not None:
            newest, new = new, _new_run(row, found.fault, new)
        if newest != self.run_id:
            again = _recall_command(newest, found.fault)
            say(f"run {newest} is of this recall, and nothing is graded again: `{again}`, or resume it")
            return Run(client, newest)
        digests = [dataset_digest(dataset) for dataset in config.datasets]

        async def import_datasets(connection: AsyncConnection) -> int:
            for dataset, digest in zip(config.datasets, digests, strict=True):
                await import_dataset(connection, dataset, digest, offers_of(config))
            return await count_mended(connection, found.task_ids, digests)

        async def extent(connection: AsyncConnection, before: datetime | None = None) -> Recall:
            now = await read_extent(connection, found.fault, before)
            await count_mended(connection, now.task_ids, digests)  # rollouts of other tasks may have ended meanwhile
            return now

        say(f"the datasets have other tests for {client.read(import_datasets)} of {found.num_tasks} tasks")
        while (found := client.read(extent)).num_steps and self.row().state in OPEN_STATES:
            say(self.stop("recalled").text)
            while self.row().state in OPEN_STATES:
                time.sleep(2)
        missing = 0
        for name in found.to_grade:
            graded = client.regrade(name, adopt=True, window=4, say=say, datasets=digests)
            missing += graded.without_verdict
            say(f"{name}: of {graded.rollouts} verdicts, {graded.changed} changed, {graded.without_verdict} missing")
        if missing > found.num_without_verdict:
            raise ConfigError(f"{missing} patches got no verdict; mend tests or grader, then give this command again")
        if not found.num_steps:  # with the verdicts that were wrong, since the new ones are right
            if (found := client.read(partial(extent, before=found.read_at))).num_steps:
                say(f"step {found.first_step} was planned with these rollouts meanwhile")
                return self.apply_recall(found, say)
            say(f"no step is touched: run {self.run_id} keeps the tests that it began with")
            return None
        values: JsonObject = {"init_from": f"{self.run_id}@{found.start_step or 0}", "retrain": True}
        values["training.steps"] = config.training.steps - (found.start_step or 0)
        values["evaluation.at"] = [one for one in config.evaluation.at if one != "start"]
        if config.loss.reference_kl and not config.loss.reference_model:
            values["loss.reference_model"] = row.model_path  # not the weights that it begins from
        run_blocking(start_run(client.stack, with_values(row.config, values), row.config_name, True, say, new))
        for sentence in client.read(partial(retrained_runs, run_id=new)):
            say(sentence)
        return Run(client, new)

    def wait(self, say: ReportProgress = print) -> JsonObject:
        """Follow the run to its end and return its result. Raises ConfigError if it fails or is paused."""

        async def follow() -> JsonObject:
            await connect_stack(self.client.stack, load_temporal_settings())
            await watch_run(self.client.stack, self.run_id, say)
            return await collect_result(self.client.stack, self.run_id)

        return run_blocking(follow())

    def steps(self) -> Rows:
        """Return one row per planned step, with its metrics as columns."""

        async def read(connection: AsyncConnection) -> list[JsonObject]:
            times = await times_by_step(connection, self.run_id, 0, LARGEST_INTEGER)
            metrics = await metrics_by_step(connection, self.run_id, 0, LARGEST_INTEGER)
            return [asdict(one) | metrics.get(step, {}) for step, one in times.items()]

        return Rows(self.client.read(read), StepTimes)

    def mix(self) -> Rows:
        """Return what each step was trained on: one row per step and dataset, and per step and family of tasks."""
        found = self.client.read(lambda connection: step_mix.step_mix(connection, self.run_id))
        return Rows(map(asdict, found), step_mix.MixedPart)

    def groups(self, state: str | None = None, purpose: str | None = None, limit: int = 100_000) -> Rows:
        """Return the run's groups, newest first, with `why`: what each waits for, or why it ended. `state`: one of
        `GroupProgress`. Raises ConfigError for a state or purpose that there is not."""
        only = read_group_filter(state, purpose)
        found = self.client.read(lambda connection: list_groups(connection, self.run_id, only, limit))
        return Rows(map(asdict, found), ListedGroup)

    def rollouts(self, limit: int = 100_000) -> Rows:
        """Return the run's rollouts, newest first."""
        wanted = RolloutFilter(run_id=self.run_id)
        found = self.client.read(lambda connection: list_rollout_lines(connection, wanted, limit))
        return Rows(map(asdict, found), RolloutLine)

    def evaluations(self) -> Rows:
        """Return one row per evaluation, with its mean reward as `mean`, by step."""
        found = self.client.read(lambda connection: evaluation_rates(connection, self.run_id))
        return Rows(map(asdict, found), EvaluationRate)

    def steering(self) -> Rows:
        """Return what people have asked of the run, newest first."""
        found = self.client.read(lambda connection: list_requests(connection, self.run_id))
        return Rows(map(asdict, found), SteeringLine)
