"""The share of turns that each agent program replays after the loss of its box, over random realistic commands.

The stack, the boxes and the agent programs are real; the engine is scripted (`_replay_policy.py`): it gives up to
`--most-turns` turns of commands in the form of the program's own tools, and when the program asks for the next turn,
its box is killed. The next attempt begins in a fresh box, does its commands again and gets the recorded answers, as far
as it asks the same (`adapter/turns/replay.py`). The store says what came of it: recorded turns that moved to the new
attempt, the first request that differed and the command whose result did, the seconds until the first turn was sampled
anew, and for how long the first attempt had worked. A call of the engine takes `--answer-seconds`; a replay saves them.

`ratchet admin bench replay` prints JSON, rows of a table to stderr as programs end, and writes `--out` after each. A
program that cannot be fetched is named, and not counted.

    ratchet admin bench replay -- --rollouts 50 --programs codex,claude_code --minutes 20
"""

import argparse
import asyncio
import contextlib
import difflib
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import uvicorn
from sqlalchemy import text
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from temporalio.client import Client
from tokenizers import Tokenizer

from adapter.turns.volatile_text import without_volatile
from cli.console import say
from ratchet.errors import RatchetError
from ratchet.types import policy_version
from stack.agent_programs import FETCHABLE, fetch_program
from store.arrays import unpack_json
from tests.benchmarks._commit import commit
from tests.benchmarks._orchestration_stack import OrchestrationStack, orchestration_stack
from tests.benchmarks._replay_policy import PROGRAMS, TASK, Case, Program, make_case
from tests.chaos.machine_faults import kill_boxes
from tests.standins.bulk_engine import as_reply, as_stream

_KILL_TRIES = 20
_CONTEXT_TOKENS = 400_000
"""The stand-in's tokenizer makes several tokens of a word, and programs begin with 50 KB of instructions."""
_OF_TURN = (
    "SELECT r.id, k.label, t.attempt, t.kind = 'main' AND t.lane = '' AS is_main,"
    " (SELECT count(*) FROM turn b WHERE b.rollout_id = r.id AND b.attempt = t.attempt AND b.kind = 'main'"
    " AND b.lane = '' AND b.state = 'completed') AS number"
    " FROM turn t JOIN rollout r ON r.id = t.rollout_id JOIN task k ON k.id = r.task_id WHERE t.id = :turn_id"
)
_BOXES = "SELECT provider_id FROM sandbox WHERE rollout_id = :rollout_id AND state = 'live'"
_ENDED = (
    "SELECT DISTINCT ON (k.label) r.id, k.label, r.outcome, r.outcome_reason, r.reward, r.attempt FROM rollout r"
    " JOIN task k ON k.id = r.task_id WHERE r.run_id = :run_id AND r.outcome IS NOT NULL ORDER BY k.label, r.id"
)
_VERSION = "UPDATE engine SET version = :version RETURNING id"
_TURNS = (
    "SELECT id, attempt, lane, kind, state, request, num_sampled, extract(epoch FROM replayed_at) AS replayed_at"
    " FROM turn WHERE rollout_id = :rollout_id ORDER BY id"
)


@dataclass
class Row:
    """One rollout. `cause`: of its first request that differed, empty if there is none; `shown`: the lines.

    `replay_seconds`: from its first replayed turn to the first that was sampled anew. `first_seconds`: from the first
    call to the loss, in the first attempt. `is_over_volatile`: a result of the replay differed in volatile parts.
    """

    number: int
    recorded: int = 0
    replayed: int = 0
    cause: str = ""
    shown: list[str] = field(default_factory=list)
    replay_seconds: float | None = None
    first_seconds: float = 0.0
    is_over_volatile: bool = False
    error: str = ""


class ReplayStack(OrchestrationStack):
    """A stack whose engine answers by the case of the rollout that asks, and ends the case's first box."""

    tool_parser = "qwen3_coder"

    def __init__(self, home: Path, at_once: int, real_boxes: bool) -> None:
        super().__init__(home, at_once, real_boxes)
        self.cases: dict[str, Case] = {}
        self.answer_seconds = 0.0
        self.tasks = set[asyncio.Task[Any]]()

    def start_engine(self) -> None:
        routes = [Route("/inference/v1/generate", self.generate, methods=["POST"]), Route("/health", _health)]
        settings = {"host": "127.0.0.1", "port": self.stack.ports["engine"], "log_level": "warning"}
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), **settings, access_log=False))  # type: ignore[arg-type]
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[assignment,method-assign]  # they end this one
        self.tasks.add(asyncio.create_task(self.server.serve()))

    async def script_engine(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        self.stop_id = self.tokenizer.token_to_id("<|im_end|>")

    async def rows(self, sql: str, **values: Any) -> Sequence[Any]:
        async with self.database.begin() as connection:
            return (await connection.execute(text(sql), values)).all()

    async def generate(self, request: Request) -> Response:
        body = json.loads(await request.body())
        turn_id = int(str(body["request_id"]).removeprefix("turn-"))
        (turn,) = await self.rows(_OF_TURN, turn_id=turn_id)
        case = self.cases[turn.label]
        case.asked_at.setdefault(turn.attempt, []).append(time.time())
        if turn.is_main and turn.number >= len(case.turns) and not case.is_lost:
            case.is_lost = True
            boxes = [row.provider_id for row in await self.rows(_BOXES, rollout_id=turn.id)]
            for _ in range(_KILL_TRIES):  # a busy one may not say its process id in time
                if await asyncio.to_thread(kill_boxes, self.stack, boxes):
                    break
            return Response(status_code=503)
        await asyncio.sleep(self.answer_seconds)
        words = case.text(turn.number) if turn.is_main else "calc"
        ids = [*self.tokenizer.encode(words, add_special_tokens=False).ids, self.stop_id]
        if body.get("stream"):
            return Response(b"".join(as_stream(ids)), media_type="text/event-stream")
        return Response(as_reply(ids), media_type="application/json")

    async def close(self) -> None:
        self.server.should_exit = True
        for task in self.tasks:
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                await asyncio.wait_for(task, 20)
        await super().close()

    # ------------------------------------------------------------ one program

    async def begin(self, client: Client, cases: Sequence[Case]) -> str:
        """Start an evaluation of the cases, which have the program in common, and return its run."""
        program = cases[0].program
        run_id = f"replay-{program.harness.replace('_', '-')}"
        self.cases |= {case.label: case for case in cases}
        dataset = self.home / f"{run_id}.jsonl"
        rows = [{"prompt": "make it right", "label": case.label, "metadata": TASK} for case in cases]
        dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "model": str(self.model),
            "datasets": [{"path": str(dataset), "use": "eval"}],
            "limits": {"agent_seconds": 600, "eval_seconds": 60},
            "harness": {"name": program.harness, "max_turns": 60},
            "sampling": {"max_context_tokens": _CONTEXT_TOKENS, "max_response_tokens": 2_000},
            "grading": {"admission": "ignored", "control_share": 0.0},
            "sandbox": {"max_boxes": self.at_once},
            "training": {"steps": 0, "bin_tokens": _CONTEXT_TOKENS},
            "evaluation": {"at": ["start"], "temperatures": [1.0], "samples": 1},
        }
        while not await self.rows(_VERSION, version=policy_version(run_id, 0, 0)):
            await asyncio.sleep(0.2)  # the engine's row is written beside
        await client.start_workflow("TrainRun", {"config": config}, id=f"run/{run_id}", task_queue="control")
        return run_id

    async def ended(self, run_id: str) -> list[Row]:
        """Return a row of each case whose rollout has ended; one that replaces another is not counted."""
        return [await self._read(self.cases[one.label], one) for one in await self.rows(_ENDED, run_id=run_id)]

    async def _read(self, case: Case, found: Any) -> Row:
        row = Row(case.number)
        if (found.outcome, found.reward, found.attempt) != ("graded", 1.0, 2):
            row.error = f"{found.outcome} {found.reward} in attempt {found.attempt}: {found.outcome_reason}"[:300]
        if found.attempt < 2:  # its box was not lost: the program ended before
            return row
        turns = await self.rows(_TURNS, rollout_id=found.id)
        recorded = [one for one in turns if one.state == "completed" and (one.replayed_at or one.attempt == 1)]
        replayed = [one for one in recorded if one.replayed_at]
        left = [one for one in recorded if not one.replayed_at]
        row.recorded = len(recorded)
        row.replayed = len(replayed)
        row.is_over_volatile = any("asked_again" in unpack_json(one.request) for one in replayed)  # type: ignore[operator]
        first, second = case.asked_at.get(1, []), case.asked_at.get(2, [])
        if first:
            row.first_seconds = round(first[-1] - first[0], 1)
        if replayed and second:
            row.replay_seconds = round(second[0] - min(float(one.replayed_at) for one in replayed), 1)
        if left:
            mains = [one.id for one in recorded if one.kind == "main" and not one.lane]
            live = [one for one in turns if one.attempt == 2 and not one.replayed_at]
            row.cause, row.shown = cause_of(case, left[0], mains, live)
        return row


async def _health(request: Request) -> Response:
    return Response(b"{}")


def cause_of(case: Case, turn: Any, mains: Sequence[int], live: Sequence[Any]) -> tuple[str, list[str]]:
    """Return why the first recorded turn that was not replayed was not, and the lines that differ."""
    if turn.id not in mains:
        return f"a call of kind {turn.kind}", []
    recorded: Any = unpack_json(turn.request)
    asked: list[Any] = [unpack_json(one.request) for one in live if (one.kind, one.lane) == (turn.kind, turn.lane)]
    again = next((one for one in asked if one["after"] == recorded["after"]), None)
    if again is None:
        return "no call at this place", []
    number = mains.index(turn.id)
    if number == 0 and (where := next((one for one in ("system", "tools") if recorded[one] != again[one]), "")):
        return where, differing(json.dumps(recorded[where], indent=0), json.dumps(again[where], indent=0))
    results = 0
    for before, after in zip(recorded["messages"], again["messages"], strict=False):
        calls = case.turns[number - 1] if number else []
        call = calls[min(results, len(calls) - 1)] if calls else None
        words = [_words(one, call.words if call else "") for one in (before, after)]
        if words[0] != words[1]:
            name = f"{call.family}: {call.words}" if call else f"first {before['role']} message"
            return name, differing(*words)
        results += before["role"] == "tool"
    if len(recorded["messages"]) != len(again["messages"]):
        return "number of messages", []
    return "options of the call", []


def _words(message: Any, command: str) -> str:
    calls = [[one["function"]["name"], one["function"]["arguments"]] for one in message.get("tool_calls") or ()]
    content = message["content"] if isinstance(message["content"], str) else json.dumps(message["content"])
    return without_volatile(content, command) + json.dumps(calls)


def differing(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line[:200] for line in lines if not line.startswith(("---", "+++", "@@"))][:8]


# ---------------------------------------------------------------- the report


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a program's figures over its rollouts that recorded a turn and lost their box."""
    counted = [row for row in rows if row.recorded]
    if not counted:
        return {"rollouts": 0, "errors": [row.error for row in rows]}
    saved = [(row.replay_seconds, row.first_seconds) for row in counted if row.replay_seconds is not None]
    return {
        "rollouts": len(counted),
        "recorded_turns": sum(row.recorded for row in counted),
        "replayed_share_of_turns": sum(row.replayed for row in counted) / sum(row.recorded for row in counted),
        "median_share_of_turns": median(row.replayed / row.recorded for row in counted),
        "replayed_to_the_last_turn": fmean(row.replayed == row.recorded for row in counted),
        "over_volatile_results": fmean(row.is_over_volatile for row in counted),
        "replay_seconds": round(median(one for one, _ in saved), 1) if saved else None,
        "first_seconds": round(median(one for _, one in saved), 1) if saved else None,
        "causes": dict(Counter(row.cause for row in counted if row.cause).most_common()),
        "errors": [row.error for row in rows if row.error],
    }


def table_row(name: str, one: dict[str, Any]) -> str:
    """Return program, rollouts, turns replayed, median share, whole replays, seconds of replay and first attempt, and
    the first causes of divergence."""
    if not one.get("rollouts"):
        return f"| {name} | not measured: {one.get('reason') or one['errors'][:1]} |"
    causes = "; ".join(f"{cause} ({number})" for cause, number in list(one["causes"].items())[:4])
    turns = f"{one['replayed_share_of_turns']:.1%} of {one['recorded_turns']} | {one['median_share_of_turns']:.0%}"
    seconds = f"{one['replay_seconds']} s, {one['first_seconds']} s"
    return f"| {name} | {one['rollouts']} | {turns} | {one['replayed_to_the_last_turn']:.0%} | {seconds} | {causes} |"


async def measure_program(
    found: ReplayStack, client: Client, program: Program, options: argparse.Namespace, until: float
) -> dict[str, Any]:
    if program.fetch:
        try:
            await asyncio.to_thread(fetch_program, FETCHABLE[program.fetch](), say)
        except RatchetError as reason:
            return {"rollouts": 0, "reason": str(reason)}
    cases = [make_case(program, number, options.seed, options.most_turns) for number in range(options.rollouts)]
    run_id = await found.begin(client, cases)
    handle = client.get_workflow_handle(f"run/{run_id}")
    ending, rows = asyncio.create_task(handle.result()), list[Row]()
    while not ending.done() and time.monotonic() < until:
        await asyncio.wait({ending}, timeout=10)
        known = {row.number for row in rows}
        rows = await found.ended(run_id)
        for row in rows:
            if row.number not in known:
                end = row.error or row.cause or "whole"
                say(f"{program.harness} {row.number}: {row.replayed} of {row.recorded} turns, {end}")
    if not ending.done():
        await handle.cancel()
    await asyncio.wait({ending}, timeout=120)
    if ending.done() and not ending.cancelled() and (error := ending.exception()):
        say(f"{run_id}: {error}")
    return summary(rows) | {"left_out": len(cases) - len(rows), "rows": [asdict(row) for row in rows]}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    wanted = options.programs.split(",") if options.programs else [one.harness for one in PROGRAMS]
    started, load = time.monotonic(), os.getloadavg()[0]
    machine = {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load": load}
    given = {name: getattr(options, name) for name in ("seed", "rollouts", "most_turns", "answer_seconds")}
    found: dict[str, Any] = {"commit": commit(), "machine": machine} | given | {"programs": {}}
    async with orchestration_stack(options.at_once, 0, real_boxes=True, kind=ReplayStack) as (stack, client):
        assert isinstance(stack, ReplayStack)
        stack.answer_seconds = options.answer_seconds
        for at, program in enumerate(one for one in PROGRAMS if one.harness in wanted):
            left = started + 60 * options.minutes - time.monotonic()
            until = time.monotonic() + left / (len(wanted) - at)
            found["programs"][program.harness] = await measure_program(stack, client, program, options, until)
            found["seconds"] = round(time.monotonic() - started)
            say(table_row(program.harness, found["programs"][program.harness]))
            if options.out:
                options.out.write_text(json.dumps(found, indent=2) + "\n")
    return found


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the stack ends, too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="accepted for symmetry")
    parser.add_argument("--rollouts", type=int, default=50, help="of each program")
    parser.add_argument("--programs", default="", help="names of harnesses, separated by commas; all if left out")
    parser.add_argument("--at-once", type=int, default=8, help="boxes at one time")
    parser.add_argument("--most-turns", type=int, default=14, help="longest script before the box is lost")
    parser.add_argument("--answer-seconds", type=float, default=1.0, help="time that a call of the engine takes")
    parser.add_argument("--seed", type=int, default=0, help="draws commands, and the turns behind which boxes are lost")
    parser.add_argument("--minutes", type=float, default=20.0, help="rollouts that end later are left out")
    parser.add_argument("--out", type=Path, help="file for the JSON after each program")
    json.dump(asyncio.run(measure(parser.parse_args())), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
