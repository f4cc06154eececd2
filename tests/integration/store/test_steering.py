"""Requests to a run: each is audited once, acts from a known step on, and is refused with a reason."""

import asyncio
from dataclasses import asdict
from typing import Any, cast

import pytest
from sqlalchemy import insert, select, update
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from activities.learning import LearnActivities
from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from ratchet.errors import ConfigError
from ratchet.payloads import EndRunInput, RunInput, RunView, StepInput, ViewRunInput
from ratchet.steering_payloads import SteerTargetInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import BatchState, JsonObject, Purpose, RunState, SteeringAction, Wish
from reads.steering import list_requests
from store import evaluations, learners, plans, runs, steering
from store.database import Database
from store.learners import NextStep
from store.runs import OrderedTask
from store.schema import BatchTable, PolicyVersionTable, RolloutGroupTable, RunTable
from store.steering import Request, SteeringAnswer
from tests.integration.training.records import make_config, make_group, make_run

SIGNAL = [1.0, 0.0, 0.0, 0.0]


class Steered:
    """A run whose groups, plans and learner are rows, steered as the commands do it."""

    def __init__(self, database: Database, run_id: str) -> None:
        self.database = database
        self.run_id = run_id
        self.num_requests = 0
        settings = load_temporal_settings()
        configs = RunConfigs(database, settings)
        self.activities = RunActivities(database, settings, configs, cast(Client, None))
        self.learning = LearnActivities(database, configs)

    async def make(self, num_groups: int = 0, **training: Any) -> None:
        await make_run(self.database, self.run_id, make_config(training={"max_staleness": 1} | training))
        async with self.database.begin() as connection:
            for number in range(num_groups):
                await make_group(connection, self.run_id, number, SIGNAL)
            await self.write(next_group_no=num_groups)

    async def write(self, **values: Any) -> None:
        async with self.database.begin() as connection:
            await connection.execute(update(RunTable).where(RunTable.run_id == self.run_id).values(**values))

    async def row(self) -> runs.RunRow:
        async with self.database.begin() as connection:
            row = await runs.get_run(connection, self.run_id)
        assert row is not None
        return row

    async def ask(self, action: SteeringAction, *arguments: Any, request_id: str | None = None) -> SteeringAnswer:
        self.num_requests += 1
        request = Request(self.run_id, request_id or str(self.num_requests), "anna@host", "to try it")
        async with self.database.begin() as connection:
            match action:
                case SteeringAction.SET:
                    return await steering.record_changes(connection, request, *arguments)
                case SteeringAction.EXTEND:
                    return await steering.record_extension(connection, request, *arguments)
            return await steering.CHANGES_OF_STATE[action](connection, request)

    async def ask_evaluation(self, request_id: str) -> None:
        """Give the run a held-out task, and ask for an evaluation of it."""
        config = make_config(datasets=[{"path": "train"}, {"path": "held-out", "use": "eval"}], evaluation={"at": []})
        await self.write(config=config.model_dump(mode="json"))
        async with self.database.begin() as connection:
            group = await make_group(connection, self.run_id, 99, SIGNAL)
            task = select(RolloutGroupTable.task_id).where(RolloutGroupTable.id == group)
            held_out = OrderedTask((await connection.execute(task)).scalar_one(), 1)
            await runs.set_task_order(connection, self.run_id, Purpose.EVAL, [held_out])
            await evaluations.ask_evaluation(connection, Request(self.run_id, request_id, "anna@host"), 0.5, 1)

    async def audit(self) -> list[JsonObject]:
        async with self.database.begin() as connection:
            return [asdict(one) for one in await list_requests(connection, self.run_id)]

    async def look(self) -> RunView:
        return await self.activities.advance_run(ViewRunInput(run_id=self.run_id))

    async def plan(self) -> int | None:
        return (await self.learning.plan(RunInput(run_id=self.run_id))).step

    async def train(self, step: int, checkpoint: bool = False) -> None:
        """Write what a learner writes."""
        async with self.database.begin() as connection:
            await connection.execute(
                update(BatchTable)
                .where(BatchTable.run_id == self.run_id, BatchTable.step == step)
                .values(state=BatchState.STEPPED)
            )
            version = {"run_id": self.run_id, "step": step, "epoch": 0, "uri": "/weights", "files": []}
            await connection.execute(insert(PolicyVersionTable).values(version=f"{self.run_id}/{step}.e0", **version))
        await self.write(step=step, **({"checkpoint_step": step, "checkpoint_uri": "/c"} if checkpoint else {}))

    async def next_step(self, step: int) -> NextStep:
        async with self.database.begin() as connection:
            return await learners.next_step(connection, self.run_id, (await self.row()).epoch, step)


@pytest.fixture
def steered(database: Database, run_id: str) -> Steered:
    return Steered(database, run_id)


async def test_a_change_is_audited_with_the_step_that_it_acts_from(steered: Steered) -> None:
    await steered.make(num_groups=4)
    assert await steered.plan() == 1
    changes = {"training.learning_rate": 5e-4, "training.groups_per_step": 1, "sampling.temperature": 0.7}
    answer = await steered.ask(SteeringAction.SET, changes)
    assert answer.changed and "training.learning_rate: 0.001 → 0.0005" in answer.text
    rows = {row["target"]: row for row in await steered.audit()}
    assert {key: row["after"] for key, row in rows.items()} == changes
    assert rows["training.groups_per_step"]["before"] == 2
    assert {(row["from_step"], row["asked_by"], row["reason"]) for row in rows.values()} == {
        (2, "anna@host", "to try it")
    }
    await steered.train(1)
    assert await steered.plan() == 2
    async with steered.database.begin() as connection:
        first, second = [await plans.get_plan(connection, steered.run_id, step) for step in (1, 2)]
    assert first is not None and second is not None
    assert (first.knobs["learning_rate"], second.knobs["learning_rate"]) == (1e-3, 5e-4)
    assert [len({member["group_id"] for member in row.members}) for row in (first, second)] == [2, 1]


async def test_a_discarded_step_is_planned_after_the_requests_before_it(steered: Steered) -> None:
    await steered.make(num_groups=4)
    assert await steered.plan() == 1
    await steered.ask(SteeringAction.SET, {"sampling.temperature": 0.7})
    await steered.ask(SteeringAction.PAUSE)
    before = [(row["action"], row["from_step"]) for row in await steered.audit()]
    assert before == [("pause", 2), ("set", 2)], "step 1 was planned before them"
    async with steered.database.begin() as connection:
        asked = Request(steered.run_id, "skip", "anna@host", "its gradient is not finite")
        await steering.record_skipped_step(connection, asked)
    await steered.ask(SteeringAction.RESUME)
    after = await steered.audit()
    assert [(row["action"], row["from_step"]) for row in after] == [
        *(("resume", 1), ("skip_step", 1), ("pause", 1), ("set", 1))
    ]
    assert after[1]["what"].startswith("skip step 1: [")
    async with steered.database.begin() as connection:
        lines = await list_requests(connection, steered.run_id)
    assert [(one.what, one.from_step) for one in lines] == [(row["what"], row["from_step"]) for row in after]
    assert await steered.plan() == 1


async def test_a_repeated_request_changes_nothing(steered: Steered) -> None:
    await steered.make()
    for _ in range(2):
        await steered.ask(SteeringAction.EXTEND, 4, request_id="once")
    assert (await steered.row()).resolved_config.training.steps == 10
    assert not (await steered.ask(SteeringAction.SET, {"training.max_staleness": 1})).changed, "it is so already"
    await steered.ask(SteeringAction.PAUSE, request_id="p")
    await steered.ask(SteeringAction.RESUME)
    assert not (await steered.ask(SteeringAction.PAUSE, request_id="p")).changed, "the late copy of an old request"
    assert (await steered.row()).state == RunState.RUNNING
    assert [row["action"] for row in await steered.audit()] == ["resume", "pause", "extend"]


async def test_concurrent_requests_are_all_kept(steered: Steered) -> None:
    await steered.make()
    await asyncio.gather(*(steered.ask(SteeringAction.EXTEND, 1) for _ in range(5)))
    assert (await steered.row()).resolved_config.training.steps == 11
    assert sorted(row["after"] for row in await steered.audit()) == [7, 8, 9, 10, 11]


async def test_a_stopped_run_ends_after_its_planned_step(steered: Steered) -> None:
    await steered.make(num_groups=6)
    assert await steered.plan() == 1
    assert "ends after step 1" in (await steered.ask(SteeringAction.STOP)).text
    assert not (await steered.ask(SteeringAction.STOP)).changed
    view = await steered.look()
    assert (view.wish, view.last_step, view.num_steps, view.plannable) == (Wish.STOP, 1, 6, True)
    assert await steered.next_step(1) is NextStep.PLANNED
    assert await steered.next_step(2) is NextStep.NONE
    await steered.train(1)
    assert not (await steered.look()).plannable
    assert await steered.plan() is None, "no later step is planned"
    ending = EndRunInput(run_id=steered.run_id, state=RunState.STOPPED, last_step=1)
    waiting = asyncio.create_task(steered.activities.end_run(ending))
    await asyncio.wait([waiting], timeout=0.5)
    assert not waiting.done(), "its checkpoint is not written"
    await steered.write(checkpoint_step=1, checkpoint_uri="/c")
    assert (await waiting).ended
    assert (await steered.row()).state == RunState.STOPPED
    await steered.ask(SteeringAction.RESUME)
    row = await steered.row()
    assert (row.state, row.wish, row.resolved_config.training.steps) == (RunState.RUNNING, Wish.NONE, 6)
    assert await steered.plan() == 2


async def test_a_paused_run_that_is_stopped_ends_without_the_step_that_it_cannot_train(steered: Steered) -> None:
    await steered.make(num_groups=6)
    await steered.plan()
    await steered.train(1, checkpoint=True)
    assert await steered.plan() == 2
    await steered.write(state=RunState.PAUSED, state_reason="the gradient of step 2 is not finite")
    await steered.ask(SteeringAction.STOP)
    assert not (await steered.learning.step(StepInput(run_id=steered.run_id, step=2))).trained, "TrainRun goes on"
    view = await steered.look()
    assert (view.step, view.last_step) == (1, 1)
    ended = await steered.activities.end_run(EndRunInput(run_id=steered.run_id, state=RunState.STOPPED, last_step=1))
    assert ended.ended


async def test_a_pause_says_that_the_run_was_to_stop(steered: Steered) -> None:
    await steered.make()
    await steered.ask(SteeringAction.STOP)
    paused = await steered.ask(SteeringAction.PAUSE)
    assert paused.text.endswith(f"it was to stop, which `ratchet resume {steered.run_id}` takes back")


async def test_a_run_that_is_paused_after_it_was_stopped_ends_if_it_is_stopped_again(steered: Steered) -> None:
    await steered.make(num_groups=6)
    await steered.plan()
    await steered.train(1, checkpoint=True)
    assert await steered.plan() == 2
    assert "ends after step 2" in (await steered.ask(SteeringAction.STOP)).text
    await steered.write(state=RunState.PAUSED, state_reason="the gradient of step 2 is not finite")
    assert (await steered.look()).last_step == 2, "its step may still be trained"
    answer = await steered.ask(SteeringAction.STOP)
    assert answer.changed and "ends after step 1" in answer.text
    view = await steered.look()
    assert (view.wish, view.step, view.last_step) == (Wish.STOP, 1, 1)
    assert not (await steered.learning.step(StepInput(run_id=steered.run_id, step=2))).trained
    assert not (await steered.ask(SteeringAction.STOP)).changed
    assert [row["after"]["stop_at"] for row in await steered.audit()] == [1, 2]
    ended = await steered.activities.end_run(EndRunInput(run_id=steered.run_id, state=RunState.STOPPED, last_step=1))
    assert ended.ended


async def test_a_run_that_was_paused_since_the_last_look_plans_nothing(steered: Steered) -> None:
    await steered.make(num_groups=4)
    assert (await steered.look()).plannable
    await steered.ask(SteeringAction.PAUSE)
    assert await steered.plan() is None
    async with steered.database.begin() as connection:
        assert await plans.newest_planned_step(connection, steered.run_id) == 0
    await steered.ask(SteeringAction.RESUME)
    assert await steered.plan() == 1


async def test_a_drained_run_trains_what_is_left(steered: Steered) -> None:
    await steered.make(num_groups=3, max_groups_seen=100)
    async with steered.database.begin() as connection:
        opened = await make_group(connection, steered.run_id, 3, SIGNAL)
        is_open = update(RolloutGroupTable).where(RolloutGroupTable.id == opened)
        await connection.execute(is_open.values(state="open"))
    await steered.write(next_group_no=4)
    await steered.ask(SteeringAction.DRAIN)
    view = await steered.look()
    assert [group.group_id for group in view.open_groups] == [opened], "no new group is made"
    assert view.plannable and await steered.plan() == 1
    await steered.train(1)
    assert not (await steered.look()).plannable, "one group is left, and one is open"
    async with steered.database.begin() as connection:
        await connection.execute(is_open.values(state="failed"))
    view = await steered.look()
    assert view.plannable and view.last_step == 6
    assert await steered.plan() == 2, "the last step has one group"
    await steered.train(2)
    view = await steered.look()
    assert (view.wish, view.step, view.last_step) == (Wish.DRAIN, 2, 2)


async def test_a_drained_run_that_is_resumed_makes_groups_again(steered: Steered) -> None:
    await steered.make()
    await steered.ask(SteeringAction.DRAIN)
    assert (await steered.look()).last_step == 0, "nothing is in flight"
    answer = await steered.ask(SteeringAction.RESUME)
    assert "it was about to drain" in answer.text
    assert (await steered.row()).resolved_config.training.steps == 6


async def test_a_run_that_is_extended_while_it_ends_goes_on(steered: Steered) -> None:
    await steered.make()
    await steered.write(step=6, checkpoint_step=6, checkpoint_uri="/c")
    await steered.ask(SteeringAction.EXTEND, 2)
    ending = EndRunInput(run_id=steered.run_id, state=RunState.DONE, last_step=6)
    assert not (await steered.activities.end_run(ending)).ended
    assert (await steered.row()).state == RunState.RUNNING


async def test_a_run_that_is_to_be_evaluated_while_it_ends_goes_on(steered: Steered) -> None:
    await steered.make()
    await steered.ask_evaluation("e1")
    await steered.write(checkpoint_step=6, checkpoint_uri="/c")
    ending = EndRunInput(run_id=steered.run_id, state=RunState.DONE, last_step=6)
    assert not (await steered.activities.end_run(ending)).ended
    assert (await steered.row()).state == RunState.RUNNING
    assert [one.label for one in (await steered.look()).evaluations or ()] == ["asked1-t0.5"]
    async with steered.database.begin() as connection:
        row = evaluations.NewEvaluation(steered.run_id, "asked1-t0.5", 0, 0.5, 1, "v")
        await evaluations.begin_evaluation(connection, row)
        await evaluations.end_evaluation(connection, steered.run_id, "asked1-t0.5")
    assert (await steered.activities.end_run(ending)).ended
    assert (await steered.row()).state == RunState.DONE


async def test_a_run_that_is_stopped_does_not_wait_for_an_evaluation(steered: Steered) -> None:
    await steered.make()
    await steered.ask_evaluation("e1")
    await steered.ask(SteeringAction.STOP)
    ending = EndRunInput(run_id=steered.run_id, state=RunState.STOPPED, last_step=0)
    assert (await steered.activities.end_run(ending)).ended
    assert (await steered.activities.end_run(ending)).ended, "the activity is repeated after its wish is cleared"
    assert (await steered.row()).state == RunState.STOPPED


async def test_the_update_of_one_run_does_not_act_on_another(steered: Steered) -> None:
    await steered.make(num_groups=1)
    async with steered.database.begin() as connection:
        statement = select(RolloutGroupTable.workflow_id).where(RolloutGroupTable.run_id == steered.run_id)
        name = (await connection.execute(statement)).scalar_one()
    asked = SteerTargetInput(
        run_id="other", action=SteeringAction.CANCEL, what=name, request_id=f"{steered.run_id}-1", by="anna"
    )
    with pytest.raises(ApplicationError, match=f"{name} belongs to run {steered.run_id}, not to run other"):
        await steered.activities.steer_target(asked)
    assert not await steered.audit()


async def test_a_finished_run_is_extended(steered: Steered) -> None:
    await steered.make()
    await steered.write(step=6, checkpoint_step=6, checkpoint_uri="/c", state=RunState.DONE)
    answer = await steered.ask(SteeringAction.EXTEND, 4)
    assert "10 steps now instead of 6, and goes on from step 6" in answer.text
    async with steered.database.begin() as connection:
        assert steered.run_id in await learners.runs_wanting_learner(connection)
    assert (await steered.look()).num_steps == 10


async def test_a_run_beside_an_open_one_is_not_extended(steered: Steered) -> None:
    await steered.make()
    await steered.write(state=RunState.DONE)
    await make_run(steered.database, f"{steered.run_id}-b", make_config())
    with pytest.raises(ConfigError, match="still open"):
        await steered.ask(SteeringAction.EXTEND, 4)
    assert (await steered.row()).resolved_config.training.steps == 6 and not await steered.audit()


@pytest.mark.parametrize(
    ("state", "action", "arguments", "expected"),
    [
        (RunState.DONE, SteeringAction.PAUSE, (), r"has ended \(done\)"),
        (RunState.DONE, SteeringAction.RESUME, (), "--add-steps STEPS"),
        (RunState.CANCELLED, SteeringAction.DRAIN, (), r"has ended \(cancelled\)"),
        (RunState.STOPPED, SteeringAction.STOP, (), r"has ended \(stopped\)"),
        (RunState.PAUSED, SteeringAction.DRAIN, (), "paused, so nothing in flight would be trained"),
        (RunState.RUNNING, SteeringAction.EXTEND, (0,), "expected a number of steps above 0"),
        (RunState.RUNNING, SteeringAction.SET, ({"training.steps": 9},), "ratchet set --add-steps"),
    ],
)
async def test_a_refusal_changes_nothing(
    steered: Steered, state: RunState, action: SteeringAction, arguments: tuple[Any, ...], expected: str
) -> None:
    await steered.make()
    await steered.write(state=state)
    before = await steered.row()
    with pytest.raises(ConfigError, match=expected):
        await steered.ask(action, *arguments)
    assert await steered.row() == before and not await steered.audit()


@pytest.mark.parametrize("number", [2**31 - 6, 2**33, 2**70])
async def test_a_run_is_not_extended_beyond_what_can_be_stored(steered: Steered, number: int) -> None:
    await steered.make()
    with pytest.raises(ConfigError, match=r"training\.steps: Input should be less than or equal to 2147483647"):
        await steered.ask(SteeringAction.EXTEND, number)
    assert "2147483647 steps now" in (await steered.ask(SteeringAction.EXTEND, 2**31 - 7)).text


async def test_only_training_runs_with_rollouts_are_steered(steered: Steered) -> None:
    with pytest.raises(ConfigError, match="there is no training run"):
        await steered.ask(SteeringAction.PAUSE)
    await steered.make()
    async with steered.database.begin() as connection:
        stored = select(RunTable.config, RunTable.model_path).where(RunTable.run_id == steered.run_id)
        config, model = (await connection.execute(stored)).one()
        row = {"run_id": "stored", "config": config, "model_path": model, "config_digest": "d", "config_name": "c"}
        await connection.execute(insert(RunTable).values(**row, seed=0, source_run_id=steered.run_id))
    on_stored = Steered(steered.database, "stored")
    with pytest.raises(ConfigError, match="trains on stored rollouts"):
        await on_stored.ask(SteeringAction.STOP)
    assert (await on_stored.ask(SteeringAction.PAUSE)).changed


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_paused_run_on_stored_rollouts_trains_no_further_step(steered: Steered, is_stored: bool) -> None:
    """All of its steps are planned from the start; a planned step of any other run is trained."""
    await steered.make(num_groups=4)
    assert await steered.plan() == 1
    await steered.write(source_run_id=steered.run_id if is_stored else None)
    await steered.ask(SteeringAction.PAUSE)
    assert await steered.next_step(1) is (NextStep.UNPLANNED if is_stored else NextStep.PLANNED)
    await steered.ask(SteeringAction.RESUME)
    assert await steered.next_step(1) is NextStep.PLANNED
