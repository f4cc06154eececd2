"""Groups, rollouts and evaluations that are cancelled or retried: once per request, and only if that is still true."""

from typing import cast

import pytest
from sqlalchemy import event, insert, select, update
from temporalio.client import Client

from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from ratchet.errors import ConfigError
from ratchet.payloads import ViewRunInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import GroupState, Outcome, Purpose, RunState, SteeringAction, Wish
from reads.steering import list_requests
from store import evaluations, groups, learners, open_rollouts, plans, runs, steering_targets
from store.database import Database
from store.evaluations import NewEvaluation
from store.groups import NewGroup
from store.learners import NextStep
from store.names import Kind
from store.plans import PlanRow
from store.runs import RunRow
from store.schema import PolicyVersionTable, RolloutGroupTable, RolloutTable, RunTable, TaskTable
from store.steering import Request, SteeringAnswer
from store.steering_targets import Target
from tests.integration.training.records import make_config, make_group, make_run

SIGNAL = [1.0, 0.0, 0.0, 0.0]


class Targets:
    """A run at step 2 of 6, whose groups and evaluations are rows."""

    def __init__(self, database: Database, run_id: str) -> None:
        self.database = database
        self.run_id = run_id

    async def make(self) -> None:
        datasets = [{"path": "train.jsonl"}, {"path": "heldout.jsonl", "use": "eval"}]
        await make_run(self.database, self.run_id, make_config(datasets=datasets))
        await self.write(step=2, next_group_no=100)
        async with self.database.begin() as connection:
            version = {"run_id": self.run_id, "step": 2, "epoch": 0, "uri": "/weights", "files": []}
            await connection.execute(insert(PolicyVersionTable).values(version=f"{self.run_id}/2.e0", **version))

    async def write(self, **values: object) -> None:
        async with self.database.begin() as connection:
            await connection.execute(update(RunTable).where(RunTable.run_id == self.run_id).values(**values))

    async def row(self) -> RunRow:
        async with self.database.begin() as connection:
            row = await runs.get_run(connection, self.run_id)
        assert row is not None
        return row

    async def group(self, number: int = 0, state: GroupState = GroupState.READY) -> int:
        async with self.database.begin() as connection:
            group_id = await make_group(connection, self.run_id, number, SIGNAL)
        await self.set_state(group_id, state)
        return group_id

    async def set_state(self, group_id: int, state: GroupState) -> None:
        async with self.database.begin() as connection:
            mine = update(RolloutGroupTable).where(RolloutGroupTable.id == group_id)
            await connection.execute(mine.values(state=state))

    async def set_outcomes(self, group_id: int, outcome: Outcome | None, member: int | None = None) -> int:
        """Write the outcome of one member, or of all; return the id of the last of them."""
        mine = update(RolloutTable).where(RolloutTable.group_id == group_id)
        if member is not None:
            mine = mine.where(RolloutTable.member == member)
        reward = 1.0 if outcome is Outcome.GRADED else None
        values = {"outcome": outcome, "reward": reward, "owner": "a workflow's run"}
        async with self.database.begin() as connection:
            found = await connection.execute(mine.values(**values).returning(RolloutTable.id))
            return max(found.scalars())

    async def evaluation(self, num_tasks: int = 1, step: int = 2, cancelled: bool = True) -> str:
        """An evaluation of which no rollout has begun. `cancelled`: by a person, and not with its run."""
        label = f"step{step}-t1"
        async with self.database.begin() as connection:
            new = NewEvaluation(self.run_id, label, step, 1.0, 2, f"{self.run_id}/{step}.e0")
            await evaluations.begin_evaluation(connection, new)
            made = []
            for number in range(num_tasks):
                task = {"dataset": "e", "dataset_digest": self.run_id, "row_digest": f"e{number}", "row_no": number}
                task |= {"label": str(number), "image": "host", "workdir": "/w", "grader": "g", "spec": {}}
                row = insert(TaskTable).values(**task).returning(TaskTable.id)
                task_id = (await connection.execute(row)).scalar_one()
                name = f"evaluate/{self.run_id}/{label}/{number}"
                made.append(NewGroup(self.run_id, 50 + number, task_id, Purpose.EVAL, 2, 1, 1.0, step, name, label))
            await groups.create_groups(connection, made, "bash_agent")
            if cancelled:
                await evaluations.end_evaluation(connection, self.run_id, label)
        return f"evaluate/{self.run_id}/{label}"

    async def find(self, name: str) -> Target:
        async with self.database.begin() as connection:
            return await steering_targets.find_target(connection, name)

    async def ask(self, action: SteeringAction, what: str | Target, request_id: str = "1") -> SteeringAnswer:
        async with self.database.begin() as connection:
            target = what if isinstance(what, Target) else await steering_targets.find_target(connection, what)
            request = Request(self.run_id, request_id, "anna@host")
            if action is SteeringAction.CANCEL:
                return await steering_targets.record_cancel(connection, request, target)
            return await steering_targets.record_retry(connection, request, target)

    async def audit(self) -> list[str]:
        async with self.database.begin() as connection:
            return [one.action for one in await list_requests(connection, self.run_id)]


@pytest.fixture
async def targets(database: Database, run_id: str) -> Targets:
    found = Targets(database, run_id)
    await found.make()
    return found


@pytest.mark.parametrize("state", [RunState.STOPPED, RunState.FAILED, RunState.CANCELLED, RunState.DONE])
async def test_a_run_that_is_opened_for_an_evaluation_trains_no_further_step(targets: Targets, state: RunState) -> None:
    if state is RunState.DONE:
        await targets.write(step=6)
        async with targets.database.begin() as connection:
            await connection.execute(update(PolicyVersionTable).values(step=6))
    name = await targets.evaluation(step=6 if state is RunState.DONE else 2)
    before = await targets.row()
    async with targets.database.begin() as connection:  # it may be what the run could not train
        await plans.insert_plan(connection, targets.run_id, PlanRow(before.step + 1, [], {}, [], 0))
        if state is not RunState.DONE:
            await groups.cancel_unstarted_groups(connection, targets.run_id)
    await targets.write(state=state, stop_at=before.step)
    answer = await targets.ask(SteeringAction.RETRY, name)
    assert f"run {targets.run_id}, which was {state}, is open until they have ended" in answer.text
    row = await targets.row()
    assert (row.state, row.resolved_config.training.steps) == (RunState.RUNNING, before.step)
    assert row.wish == (Wish.NONE if state is RunState.DONE else Wish.DRAIN)
    settings = load_temporal_settings()
    activities = RunActivities(targets.database, settings, RunConfigs(targets.database, settings), cast(Client, None))
    view = await activities.advance_run(ViewRunInput(run_id=targets.run_id))
    assert (view.step, view.last_step, view.open_groups) == (before.step, before.step, [])
    async with targets.database.begin() as connection:
        next_step = await learners.next_step(connection, targets.run_id, before.epoch, before.step + 1)
    assert next_step is NextStep.NONE
    assert view.evaluations is not None
    due = [one.label for one in view.evaluations if one.label not in view.evaluations_ended]
    assert due[0] == name.rpartition("/")[2]


async def test_the_end_of_a_run_leaves_no_rollout_of_an_evaluation_open(targets: Targets) -> None:
    """But its groups, so that the evaluation goes on when the run is resumed: what was cancelled is then replaced."""
    name = await targets.evaluation(cancelled=False)
    async with targets.database.begin() as connection:
        await groups.cancel_unstarted_groups(connection, targets.run_id)
        outcomes = set((await connection.execute(select(RolloutTable.outcome))).scalars())
        states = set((await connection.execute(select(RolloutGroupTable.state))).scalars())
        waiting = await evaluations.open_evaluation_members(connection, targets.run_id, name.rpartition("/")[2])
        replaced = await groups.replace_member(connection, waiting[0].rollout_id, max_replacements=1)
    assert (outcomes, states, len(waiting)) == ({Outcome.CANCELLED}, {GroupState.OPEN}, 2)
    assert replaced is not None


async def test_an_evaluation_whose_rollouts_have_not_begun_is_run_again(targets: Targets) -> None:
    """As after a retry in the moment in which the run ended; there is nothing to replace."""
    name = await targets.evaluation(cancelled=False)
    await targets.write(state=RunState.DONE)
    answer = await targets.ask(SteeringAction.RETRY, name)
    assert answer.changed and "2 rollouts without a verdict run again; run" in answer.text
    assert (await targets.row()).state == RunState.RUNNING
    async with targets.database.begin() as connection:
        await connection.execute(update(RolloutTable).values(outcome=Outcome.GRADED, reward=1.0))
        await evaluations.end_evaluation(connection, targets.run_id, "step2-t1")
    with pytest.raises(ConfigError, match="every rollout has a verdict"):
        await targets.ask(SteeringAction.RETRY, name, "2")


async def test_an_open_run_goes_on_after_a_retried_evaluation(targets: Targets) -> None:
    name = await targets.evaluation()
    assert "is open" not in (await targets.ask(SteeringAction.RETRY, name)).text
    assert ((await targets.row()).wish, (await targets.row()).resolved_config.training.steps) == (Wish.NONE, 6)


@pytest.mark.parametrize("taken", [GroupState.CONSUMED, GroupState.FAILED])
async def test_a_group_that_a_step_takes_meanwhile_is_not_said_to_be_cancelled(
    targets: Targets, taken: GroupState
) -> None:
    group_id = await targets.group()
    seen = await targets.find(f"group/{targets.run_id}/0")
    await targets.set_state(group_id, taken)
    with pytest.raises(ConfigError, match=f"is {taken}; only an open or a ready group can be cancelled"):
        await targets.ask(SteeringAction.CANCEL, seen)
    async with targets.database.begin() as connection:
        assert (await groups.get_group(connection, group_id)).state == taken
    assert not await targets.audit()


async def test_a_repeated_cancellation_changes_nothing(targets: Targets) -> None:
    """Also if what was cancelled has ended since, as when the activity that recorded the request runs again."""
    group_id = await targets.group(state=GroupState.OPEN)
    rollout_id = await targets.set_outcomes(group_id, None, member=0)
    assert (await targets.ask(SteeringAction.CANCEL, str(rollout_id), "r")).changed
    await targets.set_outcomes(group_id, Outcome.GRADED, member=0)
    assert not (await targets.ask(SteeringAction.CANCEL, str(rollout_id), "r")).changed, "its verdict came first"
    await targets.set_outcomes(group_id, Outcome.CANCELLED, member=0)
    assert not (await targets.ask(SteeringAction.CANCEL, str(rollout_id), "another")).changed
    name = f"group/{targets.run_id}/0"
    assert (await targets.ask(SteeringAction.CANCEL, name, "g")).changed
    for request_id in ("g", "another"):
        answer = await targets.ask(SteeringAction.CANCEL, name, request_id)
        assert not answer.changed and "was cancelled already" in answer.text
    assert await targets.audit() == ["cancel", "cancel"]


async def test_a_repeated_retry_changes_nothing(targets: Targets) -> None:
    group_id = await targets.group(state=GroupState.FAILED)
    rollout_id = await targets.set_outcomes(group_id, Outcome.INFRA_FAILED, member=0)
    assert (await targets.ask(SteeringAction.RETRY, str(rollout_id), "r")).changed
    await targets.set_outcomes(group_id, Outcome.INFRA_FAILED, member=4)
    answer = await targets.ask(SteeringAction.RETRY, f"group/{targets.run_id}/0", "r")
    assert not answer.changed and "was retried by this request" in answer.text
    assert (await targets.ask(SteeringAction.RETRY, f"group/{targets.run_id}/0", "g")).changed
    assert await targets.audit() == ["retry", "retry"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (GroupState.CANCELLED, "it is cancelled, and no step would train it; the run makes other groups by itself"),
        (GroupState.READY, r"it has enough verdicts \(ready\); `ratchet tasks regrade`"),
        (GroupState.CONSUMED, r"it has enough verdicts \(consumed\)"),
        (GroupState.OPEN, "each member has a verdict, is in flight or is replaced"),
    ],
)
async def test_a_retry_that_would_change_nothing_is_refused(targets: Targets, state: GroupState, expected: str) -> None:
    group_id = await targets.group(state=state)
    with pytest.raises(ConfigError, match=expected):
        await targets.ask(SteeringAction.RETRY, f"group/{targets.run_id}/0")
    rollout_id = await targets.set_outcomes(group_id, Outcome.INFRA_FAILED, member=0)
    if state is not GroupState.OPEN:
        with pytest.raises(ConfigError, match=f"its group, group/{targets.run_id}/0, "):
            await targets.ask(SteeringAction.RETRY, str(rollout_id))
    assert not await targets.audit()


async def test_the_names_in_the_list_of_open_rollouts_are_those_that_requests_take(targets: Targets) -> None:
    group_id = await targets.group(number=7, state=GroupState.OPEN)
    await targets.set_outcomes(group_id, None)
    async with targets.database.begin() as connection:
        found = await open_rollouts.list_slowest(connection, targets.run_id, 1)
    assert (await targets.find(found[0].group)).id == group_id
    assert (await targets.find(str(found[0].rollout_id))).group_id == group_id


async def test_an_open_rollout_of_an_evaluation_is_listed_under_its_evaluation(targets: Targets) -> None:
    name = await targets.evaluation()
    async with targets.database.begin() as connection:
        await connection.execute(update(RolloutTable).values(outcome=None))
        found = await open_rollouts.list_slowest(connection, targets.run_id, 99)
    assert found and {one.group for one in found} == {name}
    assert (await targets.find(name)).kind is Kind.EVALUATION


async def test_a_rollout_that_is_replaced_is_not_replaced_again(targets: Targets) -> None:
    rollout_id = await targets.set_outcomes(await targets.group(state=GroupState.OPEN), Outcome.INFRA_FAILED, member=0)
    assert (await targets.ask(SteeringAction.RETRY, str(rollout_id), "1")).changed
    with pytest.raises(ConfigError, match="another rollout has replaced it already"):
        await targets.ask(SteeringAction.RETRY, str(rollout_id), "2")


async def test_a_rollout_outside_of_training_groups_is_not_retried_alone(targets: Targets) -> None:
    name = await targets.evaluation()
    async with targets.database.begin() as connection:
        ids = list((await connection.execute(select(RolloutTable.id))).scalars())
        by_hand = update(RolloutTable).where(RolloutTable.id == ids[0])
        await connection.execute(by_hand.values(group_id=None, outcome=Outcome.INFRA_FAILED))
    with pytest.raises(ConfigError, match="was made by hand; `ratchet tasks run` makes another one of its task"):
        await targets.ask(SteeringAction.RETRY, str(ids[0]))
    with pytest.raises(ConfigError, match=f"is retried as a whole: `ratchet retry {name}`"):
        await targets.ask(SteeringAction.RETRY, str(ids[1]))


async def test_a_retried_evaluation_reads_only_the_groups_that_lack_verdicts(targets: Targets) -> None:
    """A run's lock is held meanwhile, and an evaluation may have thousands of groups."""
    name = await targets.evaluation(num_tasks=20)
    async with targets.database.begin() as connection:
        first = select(RolloutGroupTable.id).where(RolloutGroupTable.group_no == 50)
        lacking = (await connection.execute(first)).scalar_one()
        have = update(RolloutTable).where(RolloutTable.group_id != lacking)
        await connection.execute(have.values(outcome=Outcome.GRADED, reward=1.0))
    statements: list[str] = []

    def count(*arguments: object) -> None:
        statements.append(str(arguments[2]))

    target = await targets.find(name)
    async with targets.database.begin() as connection:
        event.listen(connection.sync_connection, "before_cursor_execute", count)
        new = await evaluations.reopen_evaluation(connection, targets.run_id, target.label)
        event.remove(connection.sync_connection, "before_cursor_execute", count)
    assert len(new) == 2
    assert sum("FOR UPDATE" in one for one in statements) == 1, "one group is locked"
    assert len(statements) < 20
