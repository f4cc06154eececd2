"""A scripted engine for runs with faults: its answers are a function of seed, task, member and prompt.

So the same member of a group gets the same verdict under every fault. It writes down what it was asked and what it
answered, one JSON object per line; the benchmark compares the store with these lines. Run as `python -m
tests.chaos.seeded_engine PORT MODEL LOG SEED DATABASE_URL [SLOTS]`, with a number of slots as an engine with LoRA.

    started    this process began; the calls of the one before are lost
    asked      a call arrived                {"turn", "rollout", "attempt", "number", "tokens", "at"}
    answered   its answer was sent           the same, `tokens`: of the answer
    dropped    its caller went away before   the same

`number` counts the turns of an attempt from 0. It is read from the prompt; the store says only which member asks.
"""

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer

from engine.client import ROUTES
from ratchet.lora_slots import slot_name, versions_of_label
from tests.standins.engine import Engine

SOLVED_FILE, SOLVED_TEXT = "a.txt", "two"
HOLD_SECONDS = (2.0, 5.0)
HOLD_FACTOR_VARIABLE = "RATCHET_CHAOS_HOLD_FACTOR"
_MEMBER = (
    "SELECT r.id AS rollout, r.member, t.attempt, k.label FROM turn t"
    " JOIN rollout r ON r.id = t.rollout_id JOIN task k ON k.id = r.task_id WHERE t.id = $1"
)
_CANARY = "SELECT canary FROM policy_version WHERE version = $1"


@dataclass(frozen=True, slots=True)
class MemberScript:
    """The policy's behaviour as one member of a group: its commands, the seconds of each call, and if it solves the
    task."""

    commands: tuple[str, ...]
    hold_seconds: tuple[float, ...]
    solves: bool

    @property
    def num_turns(self) -> int:
        """Model calls of one attempt: one per command, and the last answer."""
        return len(self.commands) + 1

    def text(self, number: int) -> str:
        """Return the answer of turn `number`."""
        if number >= len(self.commands):
            return "Done."
        parameter = f"<parameter=command>\n{self.commands[number]}\n</parameter>"
        return f"<tool_call>\n<function=bash>\n{parameter}\n</function>\n</tool_call>"


def member_script(seed: int, task: str, member: int) -> MemberScript:
    """Return the script of one member. Every group has one that solves and one that does not; solving takes longer.

    Calls take `HOLD_FACTOR_VARIABLE` times as long, so that more rollouts are live at once on the same machine.
    """
    factor = float(os.environ.get(HOLD_FACTOR_VARIABLE, "1"))
    rng = random.Random(f"{seed}/{task}/{member}")
    solves = member % 4 == 0 or (member % 4 != 1 and rng.random() < 0.5)
    looks = [f"ls; echo look {number}" for number in range(rng.randint(1, 2) + solves)]
    commands = (*looks, f"echo {SOLVED_TEXT if solves else 'three'} > {SOLVED_FILE}")
    seconds = tuple(factor * rng.uniform(*HOLD_SECONDS) for _ in range(len(commands) + 1))
    return MemberScript(commands, seconds, solves)


class SeededEngine(Engine):
    """The scripted engine with answers of its own instead of a list, and the scores of the learner's canary."""

    def __init__(self, model: Path, log: Path, seed: int, database_url: str, num_slots: int = 0) -> None:
        super().__init__(num_slots)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.stop_id = self.tokenizer.token_to_id("<|im_end|>")
        self.result_id = self.tokenizer.token_to_id("</tool_response>")
        self.log = log
        self.seed = seed
        self.database_url = database_url
        self.num_tokens = 0
        self._write("started", {})

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        if body["sampling_params"].get("prompt_logprobs") is not None:
            return await self._canary(body["token_ids"], body["model"])
        turn = str(body.get("request_id") or "")
        if not turn.startswith("turn-"):  # a probe
            return self._answer(body, [self.stop_id])
        row = await self._row(_MEMBER, int(turn.removeprefix("turn-")))
        script = member_script(self.seed, row["label"], row["member"])
        number = body["token_ids"].count(self.result_id)
        ids = [*self.tokenizer.encode(script.text(number), add_special_tokens=False).ids, self.stop_id]
        call = {"turn": turn, "rollout": row["rollout"], "attempt": row["attempt"], "number": number}
        self._write("asked", call | {"tokens": len(ids)})
        until = time.monotonic() + script.hold_seconds[min(number, script.num_turns - 1)]
        while time.monotonic() < until or not self.running.is_set():
            if await request.is_disconnected():
                self._write("dropped", call | {"tokens": len(ids)})
                return Response(status_code=499)
            await asyncio.sleep(0.1)
        self._write("answered", call | {"tokens": len(ids)})
        return self._answer(body, ids)

    def _answer(self, body: Any, ids: list[int]) -> Response:
        self.num_tokens += len(ids)
        content = [{"token_id": one, "logprob": -1.0, "rank": 1} for one in ids]
        spans = [{"version": self.version, "start": 0, "end": len(ids)}]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "weight_versions": spans}
        choice["logprobs"] = {"content": content}
        return JSONResponse({"request_id": body.get("request_id"), "choices": [choice]})

    async def _canary(self, ids: list[int], model: str) -> Response:
        """Answer with the learner's own scores of the slot's version: this engine computes no logprobs."""
        named = {slot_name(slot): version for slot, version in versions_of_label(self.version).items()}
        canary = orjson.loads((await self._row(_CANARY, named[model]))["canary"])
        self.scores = canary["logprobs"][: len(ids) - 1]
        return self._score(ids)

    async def _row(self, sql: str, key: Any) -> Any:
        """Read one row; wait while the store is away, as a real engine does not need it."""
        while True:
            try:
                connection = await asyncpg.connect(self.database_url, timeout=5)
                try:
                    row = await connection.fetchrow(sql, key)
                finally:
                    connection.terminate()
                if row is not None:
                    return row
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
                pass
            await asyncio.sleep(0.2)

    def _write(self, event: str, call: dict[str, Any]) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"event": event, "at": time.time(), **call}) + "\n")

    async def set_version(self, request: Request) -> Response:
        self.version = orjson.loads(await request.body())["new_version"]
        return JSONResponse({})

    async def weights(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.version})

    async def metrics(self, request: Request) -> Response:
        return Response(f"vllm:generation_tokens_total {self.num_tokens}\n")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse({"paths": {route: {} for route in ROUTES}})

    def app(self) -> Starlette:
        more = [
            Route("/update_weight_version", self.set_version, methods=["POST"]),
            Route("/weight_info", self.weights),
            Route("/metrics", self.metrics),
        ]
        return Starlette(routes=[*super().app().routes, *more])


if __name__ == "__main__":
    port, model, log, seed, url, *slots = sys.argv[1:]
    engine = SeededEngine(Path(model), Path(log), int(seed), url, *map(int, slots))
    uvicorn.run(engine.app(), host="127.0.0.1", port=int(port), log_level="warning", access_log=False)
