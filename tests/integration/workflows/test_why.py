"""The diagnosis of `ratchet status` for a run: at work, held by its boxes, paused, and without the services."""

from pathlib import Path

import pytest

from cli.run_screen import lines_of
from ratchet.errors import ConfigError
from reads.vitals import Vital
from scheduling.quarantine import QuarantinedTask
from stack.parts import Stack
from stack.run_status import UNKNOWN, Diagnosis, RetriedActivity, diagnose
from store import open_rollouts, open_runs
from store.open_rollouts import StageCount
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_groups import Training, training

pytestmark = pytest.mark.timeout(600)
__all__ = ["training"]


def shown(found: Diagnosis) -> str:
    lines = lines_of(found)
    assert len(lines) <= 24 and max(map(len, lines)) <= 79
    return "\n".join(lines)


async def test_agents_at_work_and_a_pause(training: Training, loop: Loop) -> None:
    await loop.until(training.working, "both agents work")

    async def both_work() -> bool:
        found = await diagnose(loop.stack, training.run_id)
        return [(one.stage, one.count) for one in found.stages] == [(open_rollouts.AGENT_WORKS, 2)]

    await loop.until(both_work, "both agents are in their boxes")
    found = await diagnose(loop.stack, training.run_id)
    assert (found.state, found.step, found.num_steps) == ("running", 0, 1)
    assert "groups: 1 open" in " ".join(shown(found).split())
    assert "open rollouts: 2 (2 agent works, for up to " in shown(found)
    assert "Temporal" not in shown(found), "it was asked and answered"
    async with loop.database.begin() as connection:
        await open_runs.pause_run(connection, training.run_id, "somebody wanted it")
    paused = await diagnose(loop.stack, training.run_id)
    assert paused.answer.startswith("it is paused: somebody wanted it; `ratchet resume")


async def test_the_newest_error_of_what_is_tried_again(training: Training, loop: Loop) -> None:
    """The gateway is away while the agents end; their boxes live on."""
    await loop.until(training.working, "both agents work")
    loop.end("gateway")
    try:
        await training.let_go()

        async def is_retried() -> bool:
            found = await diagnose(loop.stack, training.run_id)
            return any(one.tries > 1 for one in found.retried)

        await loop.until(is_retried, "a stage is tried again")
        words = shown(await diagnose(loop.stack, training.run_id))
        assert "is tried again" in words and "is retried in" in words
    finally:
        loop.spawn("gateway")

    async def ended() -> bool:
        return all(row.outcome is not None for row in (await training.rows())[:2])

    await loop.until(ended, "the members end after the outage")


async def test_a_run_that_does_not_exist(loop: Loop) -> None:
    with pytest.raises(ConfigError, match="no run 'nosuch'"):
        await diagnose(loop.stack, "nosuch")


async def test_without_any_service_the_answer_names_the_missing_one(tmp_path: Path) -> None:
    found = await diagnose(Stack(tmp_path), "some-run")
    assert found.state == UNKNOWN and "store cannot be reached: Postgres at " in found.answer
    assert any(note.startswith("Postgres: ") for note in found.notes)
    assert any(note.startswith("Temporal: ") for note in found.notes)
    assert "Postgres" in shown(found) and "no watcher runs" in shown(found) and "step 0" not in shown(found)


def test_everything_at_once_fits_on_one_screen() -> None:
    words = "the service refused the box because " + "x" * 900
    found = Diagnosis(
        run_id="r" * 40,
        state="running",
        answer=words,
        stages=[StageCount("waits for a grading box", 12345, 98765.0)] * 7,
        vitals=[Vital("a name", "1", words, "/runs/r")] * 10,
        learner=words,
        engines=[words] * 9,
        quarantined=[QuarantinedTask(1, "t" * 90, 3, words)] * 9,
        parts={f"part {number}": words for number in range(9)},
        retried=[RetriedActivity("grade", 3, 9, words)] * 9,
        working=[words] * 9,
        notes=[words],
    )
    assert shown(found).endswith("shows everything")
