"""An endpoint's answers as tokens of a local model: which are written, how a session goes on, and one step of `sft`."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from sqlalchemy import insert, select, update

from activities.outcomes import build_rollout_chains
from adapter.conversation import Message, MessageRun, Preamble, RequestOptions, ToolCall, tool_of
from adapter.output_parser import OutputParser
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import ParsedRequest
from adapter.vllm_parsers import VllmParsers
from examples.pretrained.expert_server import make_app, next_message, read_fixes
from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.types import GroupState, Purpose, UnreadCause
from stack import train_from_store
from stack.ports import free_port
from store import chains
from store.arrays import ids_from_bytes
from store.database import Database
from store.fork_report import fork_report
from store.schema import (
    GROUP_READY_SEQ,
    BatchTable,
    GradeTable,
    MetricTable,
    PatchTable,
    RolloutGroupTable,
    RolloutTable,
    SessionTable,
)
from tests.integration.adapter.conftest import Opened, adapter_here, adapter_settings, open_rollout
from tests.integration.adapter.test_dialects import CHAT_TOOLS, chat_client
from tests.integration.training.ranks import supervise
from tests.integration.training.records import make_config, make_run
from tests.standins.chat_engine import ChatEngine, calls, completion, says
from tests.standins.tiny_model import make_tokenizer, make_weights
from training.rank_runtime import RankSettings

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)
ROOT = Path(__file__).parents[3]
TASKS = ROOT / "datasets/curriculum/train_warm.jsonl"
BASH = tool_of("bash", "Runs a command.", {"command": {"type": "string"}}, required="command")


@pytest.fixture(scope="module")
def local_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("local")
    make_tokenizer(directory, vocab_size=400)
    make_weights(directory)
    shutil.copy(ROOT / "examples/pretrained/chat_template.jinja", directory)
    return directory


# ---------------------------------------------------------------- which answers are written


def call(**arguments: Any) -> ToolCall:
    return ToolCall("call_1", "bash", arguments)


WRITTEN = {
    "text": Message("assistant", "Done."),
    "empty": Message("assistant", ""),
    "outer space": Message("assistant", "\n Done. \n"),
    "a control token's name": Message("assistant", "It ends with <|im_end|> here."),
    "call": Message("assistant", "", tool_calls=(call(command="ls"),)),
    "text and call": Message("assistant", "I look.", tool_calls=(call(command="ls -a"),)),
    "two calls": Message("assistant", "Both.", tool_calls=(call(command="ls"), call(command="pwd"))),
    "quotes and lines": Message(
        "assistant", "", tool_calls=(call(command="printf 'a\\n\"b\"' &&\n\techo é\U0001f600"),)
    ),
    "braces": Message("assistant", "x = {1: {}}", tool_calls=(call(command="grep -c '{' a.py || echo '}}'"),)),
    "types": Message("assistant", "", tool_calls=(call(command="a", n=1.0, m=2**60, on=True, deep={"a": [1, {}]}),)),
}
UNWRITTEN = {
    "a mark of calls in a text": Message(
        "assistant", 'Write <tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    ),
    "an end mark in a call": Message("assistant", "", tool_calls=(call(command="echo '}\n</tool_call>'"),)),
    "thinking that the template does not show": Message("assistant", "Done.", "I think."),
    "a tool that is not offered": Message("assistant", "", tool_calls=(ToolCall("1", "fly", {}),)),
}


@pytest.mark.parametrize("name", [*WRITTEN, *UNWRITTEN])
async def test_an_answer_is_written_if_its_tokens_are_read_as_the_same_message(local_model: Path, name: str) -> None:
    renderer = Renderer(local_model)
    outputs = OutputParser(renderer, VllmParsers(local_model, "hermes", None))
    run = MessageRun.of([Message("user", "fix it")])
    preamble = Preamble.of("sys", [BASH])
    request = ParsedRequest(preamble, RequestOptions("chat"), 0, [run], [])
    message = {**WRITTEN, **UNWRITTEN}[name]
    found = await outputs.write(message, request)
    if name in UNWRITTEN:
        assert found is UnreadCause.ENDPOINT_UNWRITTEN
        return
    assert not isinstance(found, UnreadCause)
    assert renderer.ended(found) and not np.isin(found[:-1], renderer.stop_ids).any()
    read = (await outputs.parse(outputs.decode(found[:-1]), request, stopped=True)).message
    assert (read.text.strip(), [one.arguments for one in read.tool_calls]) == (
        message.text.strip(),
        [one.arguments for one in message.tool_calls],
    )
    whole = renderer.full(preamble, [run, MessageRun.of([message]), run])
    shown = renderer.tokenizer.decode(np.concatenate([renderer.full(preamble, [run]), found]))
    assert renderer.tokenizer.decode(whole).startswith(shown), "as the template shows it later"


# ---------------------------------------------------------------- sessions


def config_of(url: str, model: Path) -> RunConfig:
    endpoint = {"url": url, "model": "expert", "tokens": True}
    return make_config(model=str(model), endpoint=endpoint, training={"steps": 0}, engine={"tool_parser": "hermes"})


async def open_forwarded(database: Database, config: RunConfig, model: Path, run_id: str, member: int = 0) -> Opened:
    if member == 0:
        await make_run(database, run_id, config, model)
    opened = await open_rollout(database, member=member, run_id=run_id)
    assert config.endpoint is not None
    values = {"endpoint": config.endpoint.model_dump(mode="json")}
    async with database.begin() as connection:
        await connection.execute(update(SessionTable).where(SessionTable.id == opened.session_id).values(**values))
    return opened


async def work(address: str, opened: Opened, issue: str, most: int = 9) -> None:
    """Be an agent that runs nothing: each call has the result OK."""
    messages: list[Any] = [{"role": "system", "content": "sys"}, {"role": "user", "content": issue}]
    async with chat_client(address, opened.token) as client:
        for _ in range(most):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            messages += [{"role": "tool", "tool_call_id": one.id, "content": "OK"} for one in message.tool_calls]


async def test_a_session_goes_on_behind_an_answer_without_tokens(
    database: Database, postgres_url: str, model_dir: Path, local_model: Path, run_id: str
) -> None:
    thought = completion(
        {
            "role": "assistant",
            "content": "Hm.",
            "reasoning_content": "x",
            "tool_calls": calls("a")[1]["choices"][0]["message"]["tool_calls"],
        },
        "tool_calls",
    )
    with ChatEngine([calls("ls"), thought, calls("pwd"), says("cut", "length")]) as server:
        config = config_of(f"{server.url}/v1", local_model)
        opened = await open_forwarded(database, config, local_model, run_id)
        async with adapter_here(adapter_settings(postgres_url, model_dir)) as address:
            await work(address, opened, "fix it")
    rows = await opened.wait_delivered(4)
    assert [row.unread_call for row in rows] == [None, "endpoint_unwritten", None, "endpoint_cut"]
    assert [row.num_sampled > 0 for row in rows] == [True, False, True, False]
    assert all(not row.logprobs and not row.logprobs_valid for row in rows)
    async with database.begin() as connection:
        built = await build_rollout_chains(connection, opened.rollout_id, 1, config)
        await chains.replace_chains(connection, opened.rollout_id, built.chains)
        found = await chains.read_chains(connection, [opened.rollout_id])
        counted = (await fork_report(connection, run_id)).unread_calls
    assert counted == {"endpoint_unwritten": 1, "endpoint_cut": 1} and built.num_turns == 4
    assert built.num_trained_tokens == sum(row.num_sampled for row in rows)
    renderer = Renderer(local_model)
    text = renderer.tokenizer.decode(found[-1].ids)
    assert "Hm.\n<tool_call>" in text, "the answer without tokens is context in the next prompt"
    for chain in found:
        assert np.isnan(chain.logprobs[chain.trained]).all() and not np.isnan(chain.logprobs[~chain.sampled]).any()
        assert set(chain.temperatures[chain.trained]) == {1.0} and set(chain.policy_steps[chain.trained]) == {0}


async def test_the_expert_reads_edits_checks_and_errs() -> None:
    fixes = read_fixes([TASKS, ROOT / "datasets/quickstart/heldout.jsonl"])
    asked = [{"role": "user", "content": "is_best in text.py is wrong. It should return the sum of fee."}]
    answered = [*asked, {"role": "assistant"}, {"role": "tool"}]
    done = [*answered, *answered[1:]]

    def command(message: dict[str, Any]) -> str:
        return str(json.loads(message["tool_calls"][0]["function"]["arguments"])["command"])

    assert command(next_message(asked, fixes, False)) == "head -n 50 *.py"
    assert (
        command(next_message(answered, fixes, False))
        == "sed -i 's/return min(fee)/return sum(fee)/' text.py && ./check"
    )
    assert (
        command(next_message(answered, fixes, True)) == "sed -i 's/return min(fee)/return min(fee)/' text.py && ./check"
    )
    assert next_message(done, fixes, False) == {"role": "assistant", "content": "Done."}
    assert next_message([{"role": "user", "content": "Answer with OK."}], fixes, False)["content"] == "OK"
    assert sum(fix.has_check for fix in fixes.values()) == 90, "the quickstart's repositories have no check"


# ---------------------------------------------------------------- from a scripted expert to a step of sft


@pytest.fixture
def expert() -> Iterator[str]:
    port = free_port()
    app = make_app(read_fixes([TASKS]))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


async def finish(database: Database, run_id: str, opened: Opened, config: RunConfig, number: int, solved: bool) -> None:
    """Write what finalise writes of a rollout of an evaluation, and a ready group that has it alone."""
    async with database.begin() as connection:
        built = await build_rollout_chains(connection, opened.rollout_id, 1, config)
        await chains.replace_chains(connection, opened.rollout_id, built.chains)
        rollout = (await connection.execute(select(RolloutTable).where(RolloutTable.id == opened.rollout_id))).one()
        patch = {"rollout_id": rollout.id, "attempt": 1, "base_commit": "", "diff": b"", "num_bytes": 0, "num_files": 0}
        patch_id = await connection.scalar(insert(PatchTable).values(**patch).returning(PatchTable.id))
        grade = {"rollout_id": rollout.id, "patch_id": patch_id, "grader": "eval_cmd", "grader_version": "1"}
        grade |= {"solved": solved, "log": b"", "duration_seconds": 1.0}
        grade_id = await connection.scalar(insert(GradeTable).values(**grade).returning(GradeTable.id))
        group = {"run_id": run_id, "group_no": number, "task_id": rollout.task_id, "purpose": Purpose.EVAL, "size": 1}
        group |= {"min_graded": 1, "temperature": 1.0, "state": GroupState.READY, "workflow_id": f"g{number}"}
        group |= {"ready_seq": GROUP_READY_SEQ.next_value()}
        group_id = await connection.scalar(insert(RolloutGroupTable).values(**group).returning(RolloutGroupTable.id))
        values = {"group_id": group_id, "grade_id": grade_id, "outcome": "graded", "reward": float(solved)}
        values |= {"purpose": Purpose.EVAL, "agent_exit": "done", **built.counts()}
        await connection.execute(update(RolloutTable).where(RolloutTable.id == rollout.id).values(**values))


async def test_solved_rollouts_of_an_expert_are_trained_by_sft(
    database: Database,
    postgres_url: str,
    model_dir: Path,
    local_model: Path,
    run_id: str,
    expert: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    config = config_of(expert, local_model)
    issues = list(read_fixes([TASKS]))[:3]
    async with adapter_here(adapter_settings(postgres_url, model_dir)) as address:
        for number, issue in enumerate(issues):
            opened = await open_forwarded(database, config, local_model, run_id, number)
            await work(address, opened, issue)
            rows = await opened.wait_delivered(3)
            assert all(row.num_sampled for row in rows) and [row.kept_tokens > 0 for row in rows] == [False, True, True]
            first = Renderer(local_model).tokenizer.decode(ids_from_bytes(rows[0].sampled_ids))
            assert first == (
                'I read the code first.\n<tool_call>\n{"name": "bash", "arguments": {"command": "head -n 50 *.py"}}\n'
                "</tool_call><|im_end|>"
            )
            await finish(database, run_id, opened, config, number, solved=number != 1)
    longer = make_config().training.model_dump() | {"bin_tokens": 4096, "steps": 9}
    sft = make_config(model=str(local_model), loss={"preset": "sft"}, training=longer)
    trained = f"{run_id}-sft"
    for other in (
        make_config(model=str(local_model)),
        sft.model_copy(update={"loss": sft.loss.model_copy(update={"reference_kl": 0.1})}),
    ):
        with pytest.raises(ConfigError, match=r"logprobs are not known: loss\.preset must be sft"):
            await train_from_store.create_stored_run(database, trained, run_id, other, "x")
    assert await train_from_store.create_stored_run(database, trained, run_id, sft, "x") == 1
    async with database.begin() as connection:
        (members,) = (
            await connection.execute(select(BatchTable.members).where(BatchTable.run_id == trained))
        ).scalars()
    assert [(one["reward"], one["num_tokens"] > 0, one["update"]) for one in members] == [(1.0, True, 0)] * 2

    settings = RankSettings(trained, database.url, tmp_path / "policies", tmp_path / "checkpoints")
    assert await asyncio.to_thread(supervise, settings, 1, tmp_path / trained) == 1
    row = await asyncio.wait_for(train_from_store.watch_stored_run(database, trained, lambda line: None), 60)
    assert (row.state, row.step) == ("done", 1)
    query = select(MetricTable.name, MetricTable.value).where(MetricTable.run_id == trained)
    async with database.begin() as connection:
        metrics: dict[str, float] = {name: value for name, value in await connection.execute(query)}
    assert metrics["loss"] > 0 and metrics["trained_tokens"] == sum(one["num_tokens"] for one in members)
    unknown = {"mismatch_kl", "mismatch_abs", "mismatch_max", "engine_noise_abs", "ratio_ess"}
    assert unknown & set(metrics) == set(), "no metric pretends that an expert's logprobs are known"


async def test_an_endpoint_s_run_without_a_local_model_is_refused(database: Database, run_id: str, model: Path) -> None:
    await make_run(database, run_id, make_config(endpoint={"url": "http://e", "model": "m"}, training={"steps": 0}))
    sft = make_config(model=str(model), loss={"preset": "sft"})
    with pytest.raises(ConfigError, match="tokens are not captured; evaluate it with --tokens"):
        await train_from_store.create_stored_run(database, f"{run_id}-x", run_id, sft, "x")
