"""CPU seconds from a request's bytes to the bytes for the engine, by three methods that give the same ids.

A ratio within one process, over the same bodies, template and tokenizer, does not depend on the machine's load.

    full     parse, render and tokenise everything: what a server without memory does
    prefix   parse and render everything, tokenise what follows the text shared with the call before
    ours     `adapter.prompt.prompt_builder` as the server runs it, with attaching the turn and growing the tree
"""

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import orjson

from adapter.conversation import Message, Preamble, ToolCall
from adapter.dialects.base import Fields
from adapter.dialects.messages import MessagesDialect
from adapter.gc_tuning import freeze_startup_objects
from adapter.prompt.prompt_builder import PromptBuilder
from adapter.prompt.renderer import Renderer
from adapter.prompt.session_cache import LiveSession, SessionCache
from adapter.turns.routing import EngineRouter
from adapter.turns.tree import TurnGrowth
from engine.generate_request import IdsText, Sampling, generate_body
from ratchet.types import SessionState
from store.arrays import Ids
from store.database import Database
from store.sessions import SessionRow
from tests.benchmarks._workload import Answer, model_directory, trajectory

DIALECT = MessagesDialect()
DEPTHS = (12_000, 49_000, 86_000)
_FIELDS = msgspec.json.Decoder(Fields)


def wire(ids: Ids | IdsText) -> bytes:
    """The request as `EngineClient.generate` sends it."""
    return generate_body(ids if isinstance(ids, IdsText) else IdsText.of(ids), Sampling(4000, 1.0), "turn-1")


def rendered(renderer: Renderer, body: bytes) -> str:
    fields = _FIELDS.decode(body)
    content = DIALECT.preamble(fields)
    preamble = Preamble(content.system, tuple(content.tools), b"")
    messages = DIALECT.messages(orjson.loads(memoryview(fields["messages"])), 0)
    return renderer.template.render([*preamble.messages(), *messages], preamble.tools, generation_prompt=True)


class Full:
    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    async def turn(self, body: bytes, answer: Answer, sampled: Ids) -> Ids:
        ids = self.renderer.tokenizer.encode_whole(rendered(self.renderer, body))
        wire(ids)
        return ids


@dataclass
class Prefix:
    """Keeps the last text and its ids, with the offsets at which both may be cut: before each turn mark."""

    renderer: Renderer
    text: str = ""
    marks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))

    async def turn(self, body: bytes, answer: Answer, sampled: Ids) -> Ids:
        text = rendered(self.renderer, body)
        shared = self._shared(text)
        while self.marks[-1][0] > shared:
            self.marks.pop()
        start, num_ids = self.marks[-1]
        mark = self.renderer.tokenizer.alias["<|im_start|>"]
        parts, at = [self.ids[:num_ids]], start
        while at < len(text):
            end = text.find(mark, at + 1)
            end = len(text) if end < 0 else end
            parts.append(self.renderer.tokenizer.encode_whole(text[at:end]))
            num_ids += len(parts[-1])
            at = end
            if at < len(text):
                self.marks.append((at, num_ids))
        self.text = text
        self.ids = np.concatenate(parts)
        wire(self.ids)
        return self.ids

    def _shared(self, text: str) -> int:
        low, high = 0, min(len(text), len(self.text))
        while low < high:
            middle = (low + high + 1) // 2
            if text[low:middle] == self.text[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low


class SessionsWithoutStore(SessionCache):
    """Sessions that this process has served from their start, so there is nothing to load."""

    async def load(self, session: LiveSession) -> bool:
        session.loaded = True
        return False


class Ours:
    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.number = 0
        database = Database("postgresql://nobody@127.0.0.1:1/none")
        sessions = SessionsWithoutStore(database, renderer, 1)
        self.builder = PromptBuilder(renderer, EngineRouter(database), sessions)
        limits = {"max_context_tokens": 10**6, "max_response_tokens": 4000}
        row = SessionRow(1, 1, 1, SessionState.OPEN, 1.0, "policy", limits)
        self.session = sessions.get(row)
        self.session.loaded = True

    async def turn(self, body: bytes, answer: Answer, sampled: Ids) -> Ids:
        prepared = await self.builder.prepare(self.session, body, DIALECT, {})
        wire(self.session.ids_json.prompt_json(prepared.stream, prepared.lane))
        self.number += 1
        message = Message(
            "assistant", answer.text, "", (ToolCall(answer.call_id, "Bash", {"command": answer.command}),)
        )
        loose_key = prepared.request.loose_keys[-1]
        growth = TurnGrowth(prepared.new_keys, message, prepared.lane, prepared.kind, True, False, loose_key)
        self.session.tree.add(self.number, prepared.attach_point, prepared.stream, sampled, growth)
        return prepared.ids


Method = Callable[[bytes, Answer, Ids], Awaitable[Ids]]


async def _timed(method: Method, turns: list[tuple[bytes, Answer, Ids]]) -> tuple[list[float], list[Ids]]:
    """CPU seconds of the whole process per turn, so that work in threads counts, too."""
    seconds = []
    found = []
    for body, answer, sampled in turns:
        started = time.process_time()
        ids = await method(body, answer, sampled)
        seconds.append(time.process_time() - started)
        found.append(ids)
    return seconds, found


def measure(num_repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    directory = model_directory()
    renderer = Renderer(directory)
    assert renderer.full_render_reason is None, renderer.full_render_reason
    end = renderer.tokenizer.plain.token_to_id("<|im_end|>")
    turns = []
    for body, answer in trajectory(0, 100, system_chars=34_000, result_chars=2_350):
        spoken = renderer.tokenizer.plain.encode(answer.sampled_text(), add_special_tokens=False).ids
        turns.append((body, answer, np.array([*spoken, end], np.int32)))
    seconds: dict[str, list[list[float]]] = {"full": [], "prefix": [], "ours": []}
    sizes: list[int] = []
    for no in range(num_repeats):
        # A new renderer each time, so that a repeat does not use the tokens that an earlier one cached.
        methods: dict[str, Method] = {
            "ours": Ours(Renderer(directory)).turn,
            "prefix": Prefix(Renderer(directory)).turn,
            "full": Full(Renderer(directory)).turn,
        }
        freeze_startup_objects()  # as the served process does; it helps the other methods as much
        found = {}
        for name, method in methods.items():
            say(f"prompt cost: {name}, {no + 1} of {num_repeats}")
            gc.collect()
            taken, found[name] = asyncio.run(_timed(method, turns))
            seconds[name].append(taken)
        for name in ("prefix", "ours"):
            equal = [np.array_equal(one, other) for one, other in zip(found["full"], found[name], strict=True)]
            assert all(equal), f"{name} differs from the full path at turn {equal.index(False)}"
        sizes = [len(one) for one in found["full"]]
    return _report(seconds, sizes, [len(body) for body, _, _ in turns])


def _report(seconds: dict[str, list[list[float]]], sizes: list[int], body_bytes: list[int]) -> dict[str, Any]:
    per_turn = {
        name: [statistics.median(one) for one in zip(*repeats, strict=True)] for name, repeats in seconds.items()
    }
    by_repeat = {name: [sum(repeat) for repeat in repeats] for name, repeats in seconds.items()}
    ratios = {name: sorted(_ratios(by_repeat[name], by_repeat["ours"])) for name in ("full", "prefix")}
    rows = []
    for depth in DEPTHS:
        near = sorted(range(1, len(sizes)), key=lambda at: abs(sizes[at] - depth))[:7]
        cost = {name: 1e3 * statistics.median(taken[at] for at in near) for name, taken in per_turn.items()}
        rows.append(
            {
                "tokens": depth,
                "body_bytes": body_bytes[near[0]],
                "cpu_ms": {name: round(value, 3) for name, value in cost.items()},
                "full_over_ours": round(cost["full"] / cost["ours"], 1),
                "prefix_over_ours": round(cost["prefix"] / cost["ours"], 1),
            }
        )
    by_depth = {row["tokens"]: row["cpu_ms"]["ours"] for row in rows}  # type: ignore[index]
    return {
        "turns": len(sizes),
        "first_prompt_tokens": sizes[0],
        "last_prompt_tokens": sizes[-1],
        "first_turn_cpu_ms": {name: round(1e3 * taken[0], 1) for name, taken in per_turn.items()},
        "depths": rows,
        "trajectory_cpu_seconds": {name: round(statistics.median(sums), 3) for name, sums in by_repeat.items()},
        "trajectory_full_over_ours": round(statistics.median(ratios["full"]), 1),
        "trajectory_full_over_ours_each": [round(ratio, 1) for ratio in ratios["full"]],
        "trajectory_prefix_over_ours": round(statistics.median(ratios["prefix"]), 1),
        "growth_49k_to_86k": round(by_depth[DEPTHS[2]] / by_depth[DEPTHS[1]], 2),
        "ids_equal": True,
    }


def _ratios(theirs: list[float], ours: list[float]) -> list[float]:
    """One ratio per repeat, because the machine's speed changes more between two repeats than within one."""
    return [one / other for one, other in zip(theirs, ours, strict=True)]
