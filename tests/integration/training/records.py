"""Rows of a run as rollouts leave them: groups, members, turns and chains, small and different from each other.

The learner and the planner read only these rows, so their tests need neither engines nor sandboxes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.policy_files import link_version
from ratchet.config import RunConfig
from ratchet.stored_config import config_digest
from ratchet.types import BatchState, GroupState, Purpose, policy_version
from store import chains, runs
from store.arrays import ids_to_bytes, logprobs_to_bytes
from store.chains import TokenChain, TrainSpan
from store.database import Database
from store.runs import NewRun
from store.schema import (
    GROUP_READY_SEQ,
    BatchTable,
    RolloutGroupTable,
    RolloutTable,
    SessionTable,
    TaskTable,
    TurnTable,
)
from training import planner

NUM_IDS = 300
MEAN_LOGPROB = -6.4


def make_config(**sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "datasets": [{"path": "unused.jsonl"}],
        "sampling": {"max_response_tokens": 64, "max_context_tokens": 256},
    }
    training = {
        "groups_per_step": 2,
        "group_size": 4,
        "bin_tokens": 256,
        "learning_rate": 1e-3,
        "steps": 6,
        "checkpoint_every": 2,
    }
    values["training"] = training | {"max_staleness": 100} | sections.pop("training", {})
    return RunConfig.model_validate(values | sections)


async def make_run(
    database: Database, run_id: str, config: RunConfig, model: Path | None = None, policies: Path | None = None
) -> None:
    async with database.begin() as connection:
        row = NewRun(
            run_id=run_id,
            config=config.model_dump(mode="json"),
            config_digest=config_digest(config),
            config_name="test",
            seed=config.seed,
            model_path=str(model or ""),
        )
        await runs.create_run(connection, row)
        if model is not None and policies is not None:
            first = policies / run_id / "0.e0"
            await runs.publish_initial(
                connection, policy_version(run_id, 0, 0), run_id, str(first), link_version(model, first)
            )


async def make_group(
    connection: AsyncConnection,
    run_id: str,
    number: int,
    rewards: Sequence[float],
    step: int = 0,
    members: Sequence[dict[str, Any]] = (),
) -> int:
    """Make a ready group with one member per reward, and return its id.

    `members[n]`: columns of the n-th member, if there are any. `step`: policy step of its tokens.
    """
    random = np.random.default_rng(number)
    task = {
        "dataset": "d",
        "dataset_digest": run_id,
        "row_digest": str(number),
        "row_no": number,
        "label": str(number),
        "image": "host",
    }
    inserting = insert(TaskTable).values(**task, workdir="/w", grader="eval_cmd", spec={}).returning(TaskTable.id)
    task_id = (await connection.execute(inserting)).scalar_one()
    values = {
        "run_id": run_id,
        "group_no": number,
        "task_id": task_id,
        "purpose": Purpose.TRAIN,
        "size": len(rewards),
        "min_graded": 2,
    }
    values |= {"temperature": 1.0, "state": GroupState.READY, "ready_seq": GROUP_READY_SEQ.next_value()}
    adding = (
        insert(RolloutGroupTable)
        .values(**values, workflow_id=f"group/{run_id}/{number}")
        .returning(RolloutGroupTable.id)
    )
    group_id = int((await connection.execute(adding)).scalar_one())
    prompt = random.integers(0, NUM_IDS, 10).tolist()
    for member, reward in enumerate(rewards):
        row = {
            "run_id": run_id,
            "group_id": group_id,
            "task_id": task_id,
            "member": member,
            "purpose": Purpose.TRAIN,
            "temperature": 1.0,
        }
        row |= {
            "workflow_id": f"rollout/{run_id}/{number}/{member}",
            "harness": "bash_agent",
            "outcome": "graded",
            "reward": reward,
        }
        row |= {"agent_exit": "done"} | (members[member] if member < len(members) else {})
        rollout_id = int(
            (await connection.execute(insert(RolloutTable).values(**row).returning(RolloutTable.id))).scalar_one()
        )
        await _make_chains(
            connection, rollout_id, prompt, random, policy_version(run_id, step, 0), num_chains=1 + member % 2
        )
    return group_id


async def _make_chains(
    connection: AsyncConnection,
    rollout_id: int,
    prompt: list[int],
    random: np.random.Generator,
    version: str,
    num_chains: int,
) -> None:
    """Make two turns in the first chain; every further chain shares the first prompt and trains a turn of its own."""
    session = (
        insert(SessionTable)
        .values(rollout_id=rollout_id, attempt=1, temperature=1.0, model="policy", limits={})
        .returning(SessionTable.id)
    )
    session_id = int((await connection.execute(session)).scalar_one())

    async def turn(suffix: list[int], kept: int, parent: int | None, ordinal: int) -> tuple[int, int]:
        sampled = random.integers(0, NUM_IDS, int(random.integers(5, 15))).tolist()
        logprobs = MEAN_LOGPROB + 0.1 * random.standard_normal(len(sampled))
        row = {
            "session_id": session_id,
            "rollout_id": rollout_id,
            "attempt": 1,
            "digest": b"d",
            "ordinal": ordinal,
            "state": "completed",
            "worker": "gone",
        }
        row |= {
            "parent_turn_id": parent,
            "kept_tokens": kept,
            "dialect": "chat",
            "prompt_tokens": kept + len(suffix),
            "temperature": 1.0,
        }
        row |= {
            "suffix_ids": ids_to_bytes(suffix),
            "sampled_ids": ids_to_bytes(sampled),
            "logprobs": logprobs_to_bytes(logprobs),
        }
        row |= {"num_sampled": len(sampled), "version_spans": [{"version": version, "start": 0, "end": len(sampled)}]}
        statement = insert(TurnTable).values(**row, request=b"", delivered=True).returning(TurnTable.id)
        return int((await connection.execute(statement)).scalar_one()), len(sampled)

    first, length = await turn(prompt, 0, None, 0)
    whole = len(prompt) + length
    tool = random.integers(0, NUM_IDS, 5).tolist()
    second, more = await turn(tool, whole, first, 1)
    start = (TrainSpan(first, False, False, 0, len(prompt)), TrainSpan(first, True, True, len(prompt), length))
    built = [
        TokenChain(
            second, (*start, TrainSpan(second, False, False, whole, 5), TrainSpan(second, True, True, whole + 5, more))
        )
    ]
    for number in range(1, num_chains):
        branch, length = await turn([], len(prompt), first, number + 1)
        built.append(
            TokenChain(
                branch,
                (TrainSpan(first, False, False, 0, len(prompt)), TrainSpan(branch, True, True, len(prompt), length)),
            )
        )
    await chains.replace_chains(connection, rollout_id, built)


async def plan_ahead(database: Database, run_id: str, config: RunConfig) -> None:
    """Write every plan row of the run at once, as if each step had been trained before the next was planned."""
    async with database.begin() as connection:
        for step in range(1, config.training.steps + 1):
            assert await planner.plan_step(connection, run_id, config) == step
            await connection.execute(
                update(BatchTable).where(BatchTable.run_id == run_id).values(state=BatchState.STEPPED)
            )
        await connection.execute(update(BatchTable).where(BatchTable.run_id == run_id).values(state=BatchState.PLANNED))


async def make_planned_run(database: Database, run_id: str, config: RunConfig, model: Path, policies: Path) -> None:
    """Make a run with all its groups and plan rows, with equal contents for every run id."""
    await make_run(database, run_id, config, model, policies)
    async with database.begin() as connection:
        for number in range(config.training.steps * config.training.groups_per_step):
            await make_group(connection, run_id, number, [1.0, 0.0, 0.0, float(number % 2)])
    await plan_ahead(database, run_id, config)


async def states(database: Database, run_id: str) -> list[str]:
    async with database.begin() as connection:
        return list(
            (
                await connection.execute(
                    select(BatchTable.state).where(BatchTable.run_id == run_id).order_by(BatchTable.step)
                )
            ).scalars()
        )
