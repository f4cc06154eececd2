"""Transcripts of programs whose output the policy can write to: any JSON is read without an error."""

import json

import pytest

from activities.harnesses.base import BaseHarness, json_lines
from activities.harnesses.codex import Codex
from activities.harnesses.opencode import OpenCode
from activities.harnesses.qwen_code import QwenCode
from ratchet.types import AgentExit

ODD = [None, 1, "text", ["tokens"], {"tokens": "text", "reason": 1}, {"tokens": {"input": "many", "output": 2}}]


@pytest.mark.parametrize(
    ("harness", "kind", "name"), [(OpenCode(), "step_finish", "part"), (Codex(), "turn.completed", "usage")]
)
def test_odd_values_are_skipped(harness: BaseHarness, kind: str, name: str) -> None:
    events = [{"type": kind}, *({"type": kind, name: value} for value in ODD)]
    harness.read_transcript("\n".join(map(json.dumps, events)).encode())
    events = [{"type": kind, "part": {"tokens": {"input": 3}}, "usage": {"input": 3}}]
    assert harness.read_transcript(json.dumps(events[0]).encode()).usage == {"input": 3}


@pytest.mark.parametrize("odd", ODD)
def test_qwen_codes_events_may_have_any_value(odd: object) -> None:
    events = [{"type": "assistant", "message": odd}, {"type": "assistant", "message": {"content": odd}}]
    data = "\n".join(map(json.dumps, [*events, {"type": "result", "is_error": True, "usage": odd, "error": odd}]))
    assert QwenCode().read_transcript(data.encode()).num_steps == 0
    assert QwenCode.exit_of_events(json_lines(data.encode()), 1) is AgentExit.CRASHED


@pytest.mark.parametrize("part", ODD)
def test_the_last_event_may_have_any_part(part: object) -> None:
    event = json.dumps({"type": "step_finish", "part": part}).encode()
    assert OpenCode.exit_of_events(json_lines(event), 0) is AgentExit.DONE
