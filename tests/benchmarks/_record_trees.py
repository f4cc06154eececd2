"""Token trees as the adapter records them: eight rollouts of one task in Anthropic Messages, some with a sub-agent,
some compacted.

These have the shapes that forks, lanes and chains give to an agent's calls; made-up shapes would prove little. What
agent and model send is scripted (`_workload.py`); recording it and cutting it into chains is done by the product. Run
by hand as `python -m tests.benchmarks._record_trees`; `tests/benchmarks/training.py` reads the file.
"""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from sqlalchemy import insert, select

from adapter.prompt.renderer import Renderer
from adapter.settings import AdapterSettings
from adapter.turns.loss_mask import build_chains
from stack.ports import free_port
from store import chains, sessions, turns
from store.database import Database
from store.schema import EngineTable, RolloutTable, RunTable, TaskTable
from tests.benchmarks._adapter_load import bench_postgres, bench_process
from tests.benchmarks._workload import Conversation, corpus
from tests.benchmarks.training import RECORDED
from tests.standins.tiny_model import make_tokenizer
from training.plan_types import TrainingSequence
from training.planner import load_sequences

VOCABULARY = 4000
"""Ids must be below 4096, the size of the vocabulary of the benchmark's model."""
SYSTEM_CHARS = 1500
"""With this and RESULT_CHARS, chains have two thousand tokens instead of fifty thousand, so that a CPU can train on
them.
"""
RESULT_CHARS = 400
NUM_TOOLS = 4
NUM_ROLLOUTS = 8
NUM_TURNS = 5
_SUMMARISE = "Your task is to create a detailed summary of the conversation so far."


# ---------------------------------------------------------------- recording


@dataclass
class ConversationClient:
    """One conversation of a session; `lane` names its sub-agent, "" is the main agent."""

    http: httpx.AsyncClient
    token: str
    conversation: Conversation
    lane: str = ""

    async def turn(self) -> dict[str, Any]:
        headers = {"x-api-key": self.token, "content-type": "application/json"}
        reply = await self.http.post("/v1/messages", content=self.conversation.body(), headers=headers | self._lane())
        reply.raise_for_status()
        answer = {"role": "assistant", "content": orjson.loads(reply.content)["content"]}
        self.conversation.go_on(answer, answer["content"][-1]["id"])
        return answer

    def _lane(self) -> dict[str, str]:
        return {"x-claude-code-agent-id": self.lane} if self.lane else {}


def _conversation(seed: int, task: str, shared_seed: int = 0) -> Conversation:
    conversation = Conversation(seed, SYSTEM_CHARS, RESULT_CHARS, shared_seed)
    fields = orjson.loads(b"{" + conversation.preamble + b"}")
    conversation.preamble = orjson.dumps(fields | {"tools": fields["tools"][:NUM_TOOLS]})[1:-1]
    conversation.messages = [{"role": "user", "content": [{"type": "text", "text": task}]}]
    return conversation


async def _rollout(http: httpx.AsyncClient, token: str, number: int, task: str) -> None:
    """Five turns. Every second rollout starts a sub-agent, every fourth is compacted and continues from the summary."""
    main = ConversationClient(http, token, _conversation(number, task))
    for turn in range(NUM_TURNS):
        await main.turn()
        if turn == 1 and number % 2:
            helper = ConversationClient(
                http,
                token,
                _conversation(100 + number, f"Find where this is used. {main.conversation.piece(300)}", 1),
                "agent-1",
            )
            for _ in range(2):
                await helper.turn()
    if number % 4 == 3:
        main.conversation.messages.append({"role": "user", "content": [{"type": "text", "text": _SUMMARISE}]})
        summary = await main.turn()
        main.conversation.messages = _conversation(
            number, f"{task}\n\nUntil now:\n{summary['content'][0]['text']}"
        ).messages
        for _ in range(2):
            await main.turn()


async def _open(database: Database, number: int) -> tuple[int, str]:
    """Open a rollout with a session."""
    limits = {"max_context_tokens": 200_000, "max_response_tokens": 4000, "min_response_tokens": 8, "max_turns": None}
    async with database.begin() as connection:
        task_id = (await connection.execute(select(TaskTable.id))).scalar_one()
        values = {
            "run_id": "bench",
            "task_id": task_id,
            "member": number,
            "purpose": "train",
            "workflow_id": f"w{number}",
        }
        statement = insert(RolloutTable).values(**values, harness="bench", temperature=1.0).returning(RolloutTable.id)
        rollout_id = int((await connection.execute(statement)).scalar_one())
        session_id = await sessions.open_session(connection, rollout_id, 1, 1.0, "policy", limits)
        return rollout_id, await sessions.add_token(connection, session_id)


async def _prepare(database: Database, engine: str) -> None:
    from sqlalchemy import text

    async with database.begin() as connection:
        row = {"address": engine, "state": "ready", "model_path": ""}
        await connection.execute(insert(EngineTable).values(**row, heartbeat_at=text("now() + interval '1 day'")))
        run = {"config": {}, "config_digest": "", "config_name": "", "seed": 0, "model_path": ""}
        await connection.execute(insert(RunTable).values(run_id="bench", **run))
        task = {"dataset": "d", "dataset_digest": "d", "row_digest": "r", "row_no": 0, "spec": {}}
        await connection.execute(insert(TaskTable).values(**task, label="", image="", workdir="", grader=""))


def _sampled_outputs(renderer: Renderer) -> list[list[int]]:
    conversation = Conversation(-1, SYSTEM_CHARS, RESULT_CHARS)
    end = renderer.tokenizer.plain.token_to_id("<|im_end|>")
    texts = [conversation.answer().sampled_text() for _ in range(256)]
    return [[*renderer.tokenizer.plain.encode(one, add_special_tokens=False).ids, end] for one in texts]


async def _record(model: Path) -> list[TrainingSequence]:
    engine_port = free_port()
    adapter_port = free_port()
    engine = f"http://127.0.0.1:{engine_port}"
    async with bench_postgres() as url:
        settings = AdapterSettings(database_url=url, model_path=model, port=adapter_port, tool_parser="qwen3_coder")
        adapter = ("-m", "tests.benchmarks._adapter_process", settings.model_dump_json())
        async with (
            bench_process("-m", "tests.standins.bulk_engine", str(engine_port), health=engine + "/health"),
            bench_process(*adapter, health=f"http://127.0.0.1:{adapter_port}/health"),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{adapter_port}", timeout=600, trust_env=False) as http,
        ):
            await http.post(
                engine + "/texts", json={"outputs": _sampled_outputs(Renderer(model)), "hold_seconds": [0, 0]}
            )
            database = Database(url)
            await _prepare(database, engine)
            opened = [await _open(database, number) for number in range(NUM_ROLLOUTS)]
            task = "The test fails.\n" + Conversation(-2, SYSTEM_CHARS, RESULT_CHARS).piece(1200)
            for number, (_, token) in enumerate(opened):
                await _rollout(http, token, number, task)
            async with database.begin() as connection:
                for rollout_id, _ in opened:
                    await chains.replace_chains(
                        connection, rollout_id, build_chains(await turns.load_metas(connection, rollout_id, 1))
                    )
                found = await load_sequences(connection, [rollout_id for rollout_id, _ in opened], 0)
            await database.close()
    return found


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        text, rng = corpus(), random.Random(0)
        pieces = [text[at : at + 20_000] for at in (rng.randrange(len(text) - 20_000) for _ in range(60))]
        make_tokenizer(Path(directory), VOCABULARY, pieces)
        found = asyncio.run(_record(Path(directory)))
    numbers = {rollout_id: number for number, rollout_id in enumerate(sorted({one.rollout_id for one in found}))}
    turns_seen = {
        turn: number
        for number, turn in enumerate(sorted({int(turn) for one in found for turn in np.unique(one.turn_ids)}))
    }
    arrays = {
        "ids": np.concatenate([one.ids for one in found]),
        "mask": np.concatenate([one.mask for one in found]),
        "turns": np.concatenate([[turns_seen[int(turn)] for turn in one.turn_ids] for one in found]).astype(np.int64),
        "lengths": np.array([len(one.ids) for one in found]),
        "rollouts": np.array([numbers[one.rollout_id] for one in found]),
    }
    np.savez_compressed(RECORDED, **arrays)
    trained = int(arrays["mask"].sum())
    num_tokens = arrays["lengths"].sum()
    print(f"{len(found)} chains, {num_tokens} tokens, {trained} of them trained; lengths {arrays['lengths'].tolist()}")


if __name__ == "__main__":
    main()
