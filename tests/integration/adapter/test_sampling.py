"""Client options act on the text and never on what is sampled; an output is trained only if its logprobs are complete.

An option that reached the sampler, or a clamped logprob, would change what the recorded numbers mean. vLLM's parsers
are imported once for the process (about 13 CPU seconds).
"""

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from adapter.turns.loss_mask import build_chains
from store import turns
from store.arrays import ids_from_bytes, logprobs_from_bytes
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings
from tests.integration.adapter.test_dialects import CALL, CHAT_TOOLS, SCHEMA

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)

ASK: Any = [{"role": "user", "content": "go"}]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": ASK, "temperature": 0, "top_p": 0.1, "frequency_penalty": 2, "presence_penalty": 2, "seed": 1}
        | {"max_tokens": 20, "logit_bias": {"5": 100}, "stop": ["x"], "tools": CHAT_TOOLS, "tool_choice": "required"}
        | {"response_format": {"type": "json_object"}},
    ),
    (
        "/v1/messages",
        {"messages": ASK, "temperature": 0, "top_p": 0.1, "top_k": 1, "stop_sequences": ["x"], "max_tokens": 20}
        | {"tool_choice": {"type": "any"}}
        | {"tools": [{"name": "bash", "input_schema": SCHEMA}], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    (
        "/v1/responses",
        {"input": "go", "temperature": 0, "top_p": 0.1, "reasoning": {"effort": "low"}, "tool_choice": "required"}
        | {"max_output_tokens": 20, "text": {"format": {"type": "json_object"}}}
        | {"tools": [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": True}]},
    ),
]  # fmt: skip


async def post(address: str, opened: Opened, path: str, body: dict[str, Any]) -> Any:
    async with httpx.AsyncClient(
        base_url=address, headers={"authorization": f"Bearer {opened.token}"}, timeout=300
    ) as http:
        return await http.post(path, json={"model": "policy"} | body)


@pytest.mark.parametrize(("path", "body"), OPTIONS, ids=[path for path, _ in OPTIONS])
async def test_client_options_never_reach_the_sampler(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, body: dict[str, Any]
) -> None:
    """The engine gets the session's temperature, the client's limit of tokens, its stop sequences and the model's stop
    ids; all else is off.
    """
    assert (await post(adapter, opened, path, body)).status_code == 200
    (call,) = (await engine.seen())["calls"]
    stop_ids = call["sampling"].pop("stop_token_ids")
    assert set(stop_ids) >= {engine.renderer.tokenizer.plain.token_to_id("<|im_end|>")}
    stops = bool({"stop", "stop_sequences"} & body.keys())
    assert call["sampling"] == {
        **{
            "max_tokens": 20,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "logprobs": 0,
            "detokenize": stops,
            "seed": None,
            "routed_experts_prompt_start": 0,
        },
        **({"stop": ["x"], "skip_special_tokens": False} if stops else {}),
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    }


async def test_what_lies_behind_a_stop_sequence_is_neither_context_nor_target(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """A ReAct agent stops its model before an observation, which the model would invent.

    The engine of this test ignores stop sequences, as one may that decodes several tokens at once.
    """
    await engine.say("Act: look\nObservation: made up", "done", "one STOP two")
    body = {"messages": ASK, "max_tokens": 50, "stop_sequences": ["no", "Observation:"]}
    stopped = (await post(adapter, opened, "/v1/messages", body)).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"], stopped["content"][0]["text"]) == (
        "stop_sequence",
        "Observation:",
        "Act: look\n",
    )
    messages = [*ASK, {"role": "assistant", "content": stopped["content"]}, {"role": "user", "content": "real"}]
    assert (await post(adapter, opened, "/v1/messages", {"messages": messages, "max_tokens": 50})).status_code == 200
    rows = await opened.wait_delivered(2)
    kept = ids_from_bytes(rows[0].sampled_ids)
    text = engine.renderer.tokenizer.decode(kept)
    assert text.endswith("Observation:") and rows[0].num_sampled == len(kept) == stopped["usage"]["output_tokens"]
    assert len(logprobs_from_bytes(rows[0].logprobs)) == len(kept) and rows[0].logprobs_valid
    assert rows[0].version_spans[-1]["end"] == len(kept)
    prompt = engine.renderer.tokenizer.decode((await engine.seen())["calls"][1]["ids"])
    assert "made up" not in prompt and text + "<|im_end|>" in prompt
    # the answer came back as it was sent, so its sampled ids are used; the template's end token is context
    assert [row.fork_cause for row in rows] == ["root", "stop"] and rows[1].kept_tokens == rows[0].prompt_tokens + len(
        kept
    )
    async with opened.database.begin() as conn:
        (chain,) = build_chains(await turns.load_metas(conn, opened.rollout_id, 1))
    assert chain.num_trained == sum(row.num_sampled for row in rows)
    chat = (
        await post(
            adapter, opened, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stop": "STOP"}
        )
    ).json()
    assert (chat["choices"][0]["finish_reason"], chat["choices"][0]["message"]["content"]) == ("stop", "one ")


async def test_a_token_that_goes_on_behind_the_stop_sequence_is_kept_whole(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """One sampled token ends one text and begins the next: it stays a target, and its text is cut for the client."""
    tokenizer = engine.renderer.tokenizer
    ids = engine.ids("if License tail", stop=False)  # a word of the text that the tokenizer is trained on
    at, token = next((at, tokenizer.decode([one])) for at, one in enumerate(ids) if len(tokenizer.decode([one])) > 4)
    inner = token[1:-1]
    await engine.script({"ids": [*ids, *engine.ids(" more")]})
    body = {"messages": ASK, "max_tokens": 50, "stop_sequences": [inner]}
    stopped = (await post(adapter, opened, "/v1/messages", body)).json()
    (row,) = await opened.wait_delivered(1)
    assert ids_from_bytes(row.sampled_ids).tolist() == ids[: at + 1]
    assert stopped["content"][0]["text"] == tokenizer.decode(ids[: at + 1]).partition(inner)[0]


async def test_tool_options_act_on_the_sampled_text(thinking: str, engine: ScriptedEngine, opened: Opened) -> None:
    """`none`: text. No parallel calls: the first call. A call that violates a strict schema, or of a tool that is not
    chosen: text.
    """
    two: Any = [*CHAT_TOOLS, {"type": "function", "function": {"name": "none", "parameters": {"type": "object"}}}]
    chosen = {"mode": "required", "tools": [named("none")]}
    strict = [{"type": "function", "function": CHAT_TOOLS[0]["function"] | {"strict": True}}]
    strict[0]["function"]["parameters"] = SCHEMA | {
        "additionalProperties": False,
        "properties": {"command": {"enum": ["pwd"]}, "n": {}},
    }
    cases: list[tuple[dict[str, Any], int]] = [
        ({"tools": CHAT_TOOLS}, 2),
        ({"tools": CHAT_TOOLS, "parallel_tool_calls": False}, 1),
        ({"tools": CHAT_TOOLS, "tool_choice": "none"}, 0),
        ({"tools": strict}, 0),
        ({"tools": two, "tool_choice": named("bash")}, 2),
        ({"tools": two, "tool_choice": named("none")}, 0),
        ({"tools": two, "tool_choice": {"type": "allowed_tools", "allowed_tools": chosen}}, 0),
    ]
    for number, (options, num_calls) in enumerate(cases, start=1):
        await engine.say(f"{CALL}\n{CALL}")
        body = {"messages": [{"role": "user", "content": f"go {number}"}]} | options
        choice = (await post(thinking, opened, "/v1/chat/completions", body)).json()["choices"][0]
        assert len(choice["message"].get("tool_calls") or []) == num_calls, (options, choice)
        assert num_calls or "<tool_call>" in choice["message"]["content"]
        rows = await opened.wait_delivered(number)
        assert rows[-1].num_sampled == len(engine.ids(f"{CALL}\n{CALL}"))


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def test_a_choice_of_tools_leaves_the_stream_whole(thinking: str, engine: ScriptedEngine, opened: Opened) -> None:
    """The prompt has all tools with each choice, so turns with different choices are one chain."""
    tools: Any = [*CHAT_TOOLS, {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
    only_ls = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("ls")]}}
    messages = [*ASK]
    for number, choice in enumerate(("auto", only_ls, "none", named("bash")), start=1):
        await engine.say(CALL)
        body = {"messages": messages, "tools": tools, "tool_choice": choice}
        answer = (await post(thinking, opened, "/v1/chat/completions", body)).json()["choices"][0]["message"]
        calls = answer.get("tool_calls") or []
        assert bool(calls) is (choice in ("auto", named("bash")))
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "x"} for one in calls]
        messages += [answer, *(results or [{"role": "user", "content": "on"}])]
        await opened.wait_delivered(number)
    assert [row.fork_cause for row in await opened.turns()] == ["root", None, None, None]


async def test_a_strict_schema_fetches_nothing(thinking: str, engine: ScriptedEngine, opened: Opened) -> None:
    """The schema comes from the sandbox, and the adapter can reach more than a sandbox.

    A call that cannot be checked is text.
    """
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        reference = {"$ref": f"http://127.0.0.1:{elsewhere.getsockname()[1]}/schema.json"}
        function = CHAT_TOOLS[0]["function"] | {
            "strict": True,
            "parameters": SCHEMA | {"properties": {"command": reference}},
        }
        await engine.say(CALL)
        body = {"messages": ASK, "tools": [{"type": "function", "function": function}]}
        choice = (await post(thinking, opened, "/v1/chat/completions", body)).json()["choices"][0]
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    assert not choice["message"].get("tool_calls") and "<tool_call>" in choice["message"]["content"]


@pytest.mark.parametrize("logprobs", [[-9999.0] * 2, [None, -1.0], [-1.0]], ids=["clamped", "missing", "too few"])
async def test_a_turn_with_incomplete_logprobs_is_stored_and_never_trained(
    adapter: str, engine: ScriptedEngine, opened: Opened, logprobs: list[float | None]
) -> None:
    await engine.script({"ids": engine.ids("x"), "logprobs": logprobs})
    with capture_logs() as logs:
        assert (await post(adapter, opened, "/v1/chat/completions", {"messages": ASK})).status_code == 200
    (row,) = await opened.wait_delivered(1)
    assert not row.logprobs_valid and row.num_sampled == 2
    assert [log["turn"] for log in logs if log["log_level"] == "error"] == [row.id]
    async with opened.database.begin() as conn:
        assert [chain.num_trained for chain in build_chains(await turns.load_metas(conn, opened.rollout_id, 1))] == [0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_body_beyond_the_limit_is_413(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened, path: str
) -> None:
    async with adapter_here(adapter_settings(postgres_url, model_dir, max_body_bytes=20_000)) as address:
        small = dict(OPTIONS)[path]
        large = {
            name: long_message(20_000) if name in ("messages", "input") else value for name, value in small.items()
        }
        refused = await post(address, opened, path, large)
        assert refused.status_code == 413 and "20000 bytes" in refused.json()["error"]["message"], refused.text
        assert (await post(address, opened, path, small)).status_code == 200


def long_message(num_chars: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * num_chars}]


PINGS = [
    ("/v1/messages", "event: ping"),
    ("/v1/chat/completions", ": ping"),
    ("/v1/responses", "event: response.in_progress"),
]


@pytest.mark.parametrize(("path", "ping"), PINGS, ids=[path for path, _ in PINGS])
async def test_a_silent_stream_is_pinged(
    adapter: str, engine: ScriptedEngine, opened: Opened, path: str, ping: str
) -> None:
    await engine.script({"ids": engine.ids("Z"), "hold": "gate"})
    body = dict(OPTIONS)[path] | {"stream": True, "model": "policy"}
    lines: list[str] = []
    async with (
        httpx.AsyncClient(base_url=adapter, headers={"x-api-key": opened.token}, timeout=300) as http,
        http.stream("POST", path, json=body) as reply,
    ):
        async for line in reply.aiter_lines():
            lines.append(line)
            if lines.count(ping) == 3 and line == ping:
                await engine.release("gate")
    assert lines.count(ping) >= 3 and '"Z"' in "".join(lines[-20:])
