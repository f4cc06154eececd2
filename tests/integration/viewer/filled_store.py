"""A run as rollouts leave it, with one of everything that a page shows: tools, a sub-agent, a compaction, a fork,
verdicts of all kinds, a group without signal, a step, metrics, an evaluation, and a rollout that still runs.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection
from tokenizers import Tokenizer

from ratchet.token_statistics import TrainedTurn
from ratchet.types import policy_version
from store import chains
from store.arrays import ids_to_bytes, logprobs_to_bytes, pack_json, pack_text
from store.chains import TokenChain, TrainSpan
from store.database import Database
from store.metrics import record_metrics
from store.schema import (
    AdmissionTable,
    AttemptTable,
    BatchTable,
    EvaluationTable,
    GradeTable,
    PatchTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    SandboxTable,
    SessionTable,
    TaskTable,
    TurnTable,
)
from store.token_statistics import record_trained_turns
from store.training_groups import GroupUse, record_group_uses
from tests.integration.training.records import make_config, make_run

DIFF = """diff --git a/calc.py b/calc.py
index 1..2 100644
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
SECRET_MARKUP = "<script>alert('an agent wrote this')</script>"


@dataclass(frozen=True)
class FilledRun:
    """Ids of what the pages are about. `solved` has all kinds of turns; `running` has a call in flight."""

    run_id: str
    task: int
    trained_group: int
    silent_group: int
    open_group: int
    solved: int
    unsolved: int
    rejected: int
    failed: int
    running: int
    in_flight_turn: int


def tool_call(number: int, name: str, **arguments: str) -> dict[str, Any]:
    return {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def said(text: str, *calls: dict[str, Any], reasoning: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return (
        message
        | ({"tool_calls": list(calls)} if calls else {})
        | ({"reasoning_content": reasoning} if reasoning else {})
    )


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"call-{number}"}


class RunFiller:
    def __init__(self, connection: AsyncConnection, run_id: str, model: Path) -> None:
        self.connection = connection
        self.run_id = run_id
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.clock = datetime.now(UTC) - timedelta(hours=1)

    def tick(self, seconds: float) -> datetime:
        self.clock += timedelta(seconds=seconds)
        return self.clock

    async def insert(self, table: Any, **values: Any) -> int:
        return int((await self.connection.execute(insert(table).values(**values).returning(table.id))).scalar_one())

    async def task(self, number: int) -> int:
        task_id = await self.insert(
            TaskTable, dataset="shop", dataset_digest=self.run_id, row_digest=str(number), row_no=number,
            label=f"shop-{number}", image="host", workdir="/w", grader="pytest",
            spec={"problem_statement": "add() subtracts. Mend it."},
        )  # fmt: skip
        evidence = [{"patch": "gold", "solved": True, "reason": "all tests passed", "seconds": 1.5, "tests": 2}]
        await self.insert(
            AdmissionTable, task_id=task_id, grader="pytest", grader_version="7", admitted=True, evidence=evidence,
            oracle={}, gold_seconds=1.5,
        )  # fmt: skip
        return task_id

    async def group(self, number: int, task_id: int, state: str, purpose: str = "train", label: str = "") -> int:
        return await self.insert(
            RolloutGroupTable, run_id=self.run_id, group_no=number, task_id=task_id, purpose=purpose, label=label,
            state=state, size=2, min_graded=2, temperature=1.0, workflow_id=f"group/{self.run_id}/{number}",
            created_at=self.tick(1),
        )  # fmt: skip

    async def rollout(self, group_id: int, task_id: int, member: int, **values: Any) -> int:
        created = self.tick(5)
        columns = {"purpose": "train", "owner": "workflow-run", "attempt": 1, "claimed_at": self.tick(2), **values}
        if columns.get("outcome"):
            columns["ended_at"] = self.clock + timedelta(seconds=60)
        rollout_id = await self.insert(
            RolloutTable, run_id=self.run_id, group_id=group_id, task_id=task_id, member=member, harness="bash_agent",
            temperature=1.0, workflow_id=f"rollout/{self.run_id}/{group_id}/{member}", created_at=created, **columns,
        )  # fmt: skip
        box = await self.insert(
            SandboxTable, provider="e2b", provider_id=f"box-{rollout_id}", role="agent", rollout_id=rollout_id,
            attempt=1, workflow_id="w", image="host", state="released" if columns.get("outcome") else "live",
            created_at=self.tick(0.5), live_at=self.tick(1.5), release_reason="the agent has ended",
            released_at=columns.get("ended_at"),
        )  # fmt: skip
        await self.insert(
            AttemptTable, rollout_id=rollout_id, n=1, sandbox_id=box, used_seconds=31.5,
            agent_exit=columns.get("agent_exit"), workspace_log=pack_text("cloned\n"), transcript=pack_text("hello\n"),
        )  # fmt: skip
        return rollout_id

    async def session(self, rollout_id: int) -> int:
        return await self.insert(
            SessionTable, rollout_id=rollout_id, attempt=1, temperature=1.0, model="policy", limits={}
        )

    async def turn(
        self, session_id: int, rollout_id: int, ordinal: int, messages: list[dict[str, Any]],
        answer: dict[str, Any] | None, after: int | None, **values: Any,
    ) -> int:  # fmt: skip
        text = f"turn {ordinal} answers: " + (answer or {}).get("content", "")
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        suffix = self.tokenizer.encode(f"turn {ordinal} reads", add_special_tokens=False).ids
        request: dict[str, Any] = {"after": after, "messages": messages}
        if after is None:
            request |= {"system": "You mend code.", "tools": [{"type": "function"}]}
        done: dict[str, Any] = {"state": "in_flight", "created_at": self.tick(2)}
        if answer is not None:
            versions = [{"version": policy_version(self.run_id, 0, 0), "start": 0, "end": len(ids)}]
            done |= {
                "state": "completed", "sampled_ids": ids_to_bytes(ids), "num_sampled": len(ids), "delivered": True,
                "logprobs": logprobs_to_bytes([-0.001 - 0.7 * (at % 13) for at in range(len(ids))]),
                "version_spans": versions, "finish_reason": "stop", "completed_at": self.tick(1.5),
                "answer": pack_json({"message": answer, "finish": "stop"}),
            }  # fmt: skip
        return await self.insert(
            TurnTable, session_id=session_id, rollout_id=rollout_id, attempt=1, digest=str(ordinal).encode(),
            ordinal=ordinal, parent_turn_id=after, dialect="chat", prompt_tokens=len(suffix) + 40 * ordinal,
            suffix_ids=ids_to_bytes(suffix), worker="gone", temperature=1.0, request=pack_json(request), **done,
            **values,
        )  # fmt: skip

    async def conversation(self, rollout_id: int, variant: str = "") -> None:
        """Write turns with a shell call, an edit, a sub-agent, a compaction and a history that is sent again."""
        session = await self.session(rollout_id)
        question = [{"role": "user", "content": "add() subtracts. Mend it."}]
        read = said("", tool_call(1, "bash", command=f"cat calc.py{variant}"), reasoning="First I read the code.")
        first = await self.turn(session, rollout_id, 0, question, read, None, fork_cause="root")
        edit = tool_call(2, "Edit", file_path="calc.py", old_string="return a - b", new_string="return a + b")
        second = await self.turn(
            session,
            rollout_id,
            1,
            [result(1, f"def add(a, b):\n    return a - b\n{SECRET_MARKUP}")],
            said("", edit),
            first,
        )
        helper = [{"role": "user", "content": "Look for other places."}]
        await self.turn(
            session, rollout_id, 2, helper, said("There are none."), None, lane="helper", kind="sub_agent",
            fork_cause="sub_agent",
        )  # fmt: skip
        third = await self.turn(
            session, rollout_id, 3, [result(2, "ok")], said("Summary: mended."), second, kind="compaction"
        )
        await self.turn(
            session, rollout_id, 4, [*question, said("Summary: mended.")], said("Done."), None, fork_cause="compaction"
        )
        await self.build_chains(rollout_id, [first, second, third])

    async def build_chains(self, rollout_id: int, turn_ids: list[int]) -> None:
        rows = await self.connection.execute(
            select(TurnTable.id, TurnTable.suffix_ids, TurnTable.num_sampled).where(TurnTable.id.in_(turn_ids))
        )
        spans: list[TrainSpan] = []
        start = 0
        for row in sorted(rows, key=lambda one: one.id):
            for sampled, length in ((False, len(row.suffix_ids) // 4), (True, row.num_sampled)):
                spans.append(TrainSpan(row.id, sampled, sampled, start, length))
                start += length
        await chains.replace_chains(self.connection, rollout_id, [TokenChain(turn_ids[-1], tuple(spans))])

    async def verdict(self, rollout_id: int, solved: bool, **values: Any) -> int:
        patch = await self.insert(
            PatchTable, rollout_id=rollout_id, attempt=1, base_commit="c0ffee", diff=pack_text(DIFF),
            num_bytes=len(DIFF), num_files=1,
        )  # fmt: skip
        tests = {"test_add": "passed" if solved else "failed", "test_sub": "passed"}
        grade = {"fail_to_pass": [int(solved), 1], "pass_to_pass": [1, 1], "has_oracle": True, **values}
        grade_id = await self.insert(
            GradeTable, rollout_id=rollout_id, patch_id=patch, grader="pytest", grader_version="7", solved=solved,
            tests=tests, log=pack_text("2 tests ran\n"), duration_seconds=3.25,
            reason=grade.pop("reason", "every test passed" if solved else "test_add failed"), **grade,
        )  # fmt: skip
        await self.connection.execute(
            RolloutTable.__table__.update().where(RolloutTable.id == rollout_id).values(grade_id=grade_id)
        )
        return grade_id

    async def trained_turns(self, rollout_ids: list[int]) -> list[TrainedTurn]:
        """Return what a learner could have seen: entropies that grow, log-ratios to both sides, and one that is NaN."""
        found = []
        for chain in await chains.read_chains(self.connection, rollout_ids):
            for turn_id in np.unique(chain.turn_ids[chain.trained]).tolist():
                (places,) = np.nonzero(chain.trained & (chain.turn_ids == turn_id))
                values = np.linspace(0, 3, len(places)), np.linspace(-1, 1, len(places))
                values[1][1] = np.nan
                halves = (one.astype(np.float16) for one in values)
                found.append(TrainedTurn(turn_id, chain.rollout_id, int(places[0]), *halves))
        return found

    async def step(self, group_id: int, silent_group: int, members: list[tuple[int, float, float]]) -> None:
        planned = [
            {"rollout_id": rollout_id, "group_id": group_id, "grade_id": None, "reward": reward, "advantage": advantage,
             "num_tokens": 30, "update": 0, "weight": 0.01}
            for rollout_id, reward, advantage in members
        ]  # fmt: skip
        await self.connection.execute(
            insert(BatchTable).values(
                run_id=self.run_id, step=1, state="stepped", members=planned, denominators=[{"tokens": 60}],
                knobs={"min_policy_step": 0, "updates_per_step": 1, "loss": {}}, seed=0,
                planned_at=self.tick(1), stepped_at=self.tick(100),
            )
        )  # fmt: skip
        rollout_ids = [rollout_id for rollout_id, _, _ in members]
        await record_trained_turns(self.connection, self.run_id, 1, await self.trained_turns(rollout_ids))
        uses = [GroupUse(group_id, 1, "trained"), GroupUse(silent_group, 1, "no_signal")]
        await record_group_uses(self.connection, self.run_id, uses)
        metrics = {"reward_mean": 0.5, "entropy": 0.7, "mismatch_kl": 0.01, "mismatch_max": 0.4, "ratio_ess": 0.97}
        metrics |= {
            "masked_fraction": 0.02,
            "staleness_mean": 0.5,
            "staleness_max": 1.0,
            "loss": -0.02,
            "grad_norm": 0.3,
        }
        metrics |= {
            "trained_tokens": 60.0,
            "step_seconds": 2.0,
            "wait_for_batch_seconds": 30.0,
            "alarm_no_contrast": 1.0,
        }
        for number in (1, 2, 3):
            await record_metrics(
                self.connection, self.run_id, number, {name: value * number for name, value in metrics.items()}
            )


async def fill_run(database: Database, run_id: str, model: Path) -> FilledRun:
    """Write the run and return its ids."""
    await make_run(database, run_id, make_config(), model)
    async with database.begin() as connection:
        filler = RunFiller(connection, run_id, model)
        task = await filler.task(0)
        trained = await filler.group(0, task, "consumed")
        ended = {"outcome": "graded", "agent_exit": "done", "num_turns": 5, "num_chains": 1, "num_trained_tokens": 30}
        solved = await filler.rollout(trained, task, 0, **ended, reward=1.0, outcome_reason="every test passed")
        await filler.conversation(solved)
        confirmed = [{"run": 0, "broken_oracle": 2, "passed": [], "failed": 2, "seconds": 1.0}]
        await filler.verdict(solved, True, control=confirmed, flags=[{"what": "skips a test", "place": "calc.py:3"}])
        unsolved = await filler.rollout(trained, task, 1, **ended, reward=0.0, outcome_reason="test_add failed")
        await filler.conversation(unsolved, variant=" -n")
        await filler.verdict(unsolved, False)
        silent = await filler.group(1, task, "consumed")
        rejected = {**ended, "outcome": "rejected", "outcome_reason": "it changed the runner"}
        rejected_id = await filler.rollout(silent, task, 0, **rejected, reward=0.0)
        findings = [{"rule": "conftest", "path": "conftest.py", "action": "left out"}]
        await filler.verdict(rejected_id, False, rejected=True, rule="runner_tampered", findings=findings)
        await filler.rollout(silent, task, 1, **ended, reward=0.0)
        lost = {"outcome": "infra_failed", "outcome_reason": "SandboxLostError: the box is gone"}
        failed = await filler.rollout(await filler.group(2, task, "failed"), task, 0, **lost)
        evaluation = await filler.group(3, task, "ready", "eval", "start-greedy")
        evaluated = await filler.rollout(evaluation, task, 0, **{**ended, "purpose": "eval"}, reward=1.0)
        await filler.verdict(evaluated, True)
        await connection.execute(
            insert(EvaluationTable).values(
                run_id=run_id, label="start-greedy", step=0, temperature=0.0, num_samples=1,
                policy_version=policy_version(run_id, 0, 0),
            )
        )  # fmt: skip
        opened = await filler.group(4, task, "open")
        running = await filler.rollout(opened, task, 0)
        in_flight = await filler.turn(
            await filler.session(running), running, 0, [{"role": "user", "content": "Mend it."}], None, None,
            fork_cause="root",
        )  # fmt: skip
        await filler.step(trained, silent, [(solved, 1.0, 0.5), (unsolved, 0.0, -0.5)])
        began = {"step": 3, "created_at": datetime.now(UTC) - timedelta(hours=3)}
        await connection.execute(RunTable.__table__.update().where(RunTable.run_id == run_id).values(began))
    return FilledRun(run_id, task, trained, silent, opened, solved, unsolved, rejected_id, failed, running, in_flight)
