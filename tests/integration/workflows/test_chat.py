"""A chat: a person's messages through the adapter as turns of a rollout by hand, without reward and training."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from client import Client
from client.chat import Chat, served_config
from client.chat_pages import add_chats
from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.types import EngineState
from reads.turns import read_turn_contents
from store import runs
from store.schema import EngineTable, RolloutTable, SessionTable, TurnTable
from tests.integration.workflows.conftest import ROOT, Loop
from tests.integration.workflows.test_generate import boxes_of, sampled_of, trained_of
from tests.integration.workflows.test_rollout import TASK
from viewer.app import create_viewer_app
from viewer.settings import ViewerSettings

pytestmark = pytest.mark.timeout(600)


class Talk:
    """A chat whose blocking calls run in threads. `said`: what it reported."""

    def __init__(self, loop: Loop, config: RunConfig) -> None:
        self.loop = loop
        self.said: list[str] = []
        self.chat = Chat(Client(loop.home), config, self.said.append)

    async def __aenter__(self) -> "Talk":
        await asyncio.to_thread(self.chat.__enter__)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.chat.__exit__)

    async def send(self, text: str) -> str:
        pieces = await asyncio.to_thread(lambda: list(self.chat.send(text)))
        return "".join(one.text for one in pieces)

    async def until_said(self, words: str) -> None:
        async def has_said() -> bool:
            return any(words in line for line in self.said)

        await self.loop.until(has_said, f"it says {words!r}")

    async def ended(self) -> Any:
        async def row() -> Any:
            async with self.loop.database.begin() as connection:
                found = await connection.execute(
                    select(RolloutTable).where(
                        RolloutTable.id == self.chat.rollout_id, RolloutTable.outcome.is_not(None)
                    )
                )
                return found.one_or_none()

        return await self.loop.until(row, "the rollout has ended")


MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def make_config(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> MakeConfig:
    for name in ("RATCHET_TEMPORAL_CONFIG", "RATCHET_DATABASE_URL", "TEMPORAL_ADDRESS"):
        if name in loop.environment:
            monkeypatch.setenv(name, loop.environment[name])

    def make(**sections: Any) -> RunConfig:
        datasets = [{"path": loop.dataset(**TASK), "use": "eval"}]
        values = {"model": str(loop.model), "datasets": datasets, "training": {"steps": 0}}
        return RunConfig.model_validate({**values, "harness": {"max_turns": 1}, **sections})

    return make


async def test_messages_are_turns_of_one_conversation_that_nothing_trains(loop: Loop, make_config: MakeConfig) -> None:
    await loop.script("Hello.", "You said hi.")
    async with Talk(loop, make_config()) as talk:
        assert await talk.send("hi") == "Hello."
        assert await talk.send("What did I say?") == "You said hi."
    roles = [(one["role"], one["content"]) for one in talk.chat.messages]
    assert roles[2:] == [("user", "What did I say?"), ("assistant", "You said hi.")]
    row = await talk.ended()
    assert (row.outcome, row.reward, row.purpose, row.group_id) == ("cancelled", None, "eval", None)
    assert (row.num_turns, row.num_trained_tokens, row.num_chains) == (2, 0, 0)
    assert await trained_of(loop, row.id) == 0 and await sampled_of(loop, row.id, 1) > 0
    async with loop.database.begin() as connection:
        parents = select(TurnTable.id, TurnTable.parent_turn_id).where(TurnTable.rollout_id == row.id)
        first, second = await connection.execute(parents.order_by(TurnTable.id))
        states = await connection.execute(select(SessionTable.state).where(SessionTable.rollout_id == row.id))
        assert list(states.scalars()) == ["closed"] and second.parent_turn_id == first.id
        run = await runs.the_run(connection, row.run_id)
    assert run.is_by_hand

    async def released() -> bool:
        return set(await boxes_of(loop, row.id)) == {("agent", "released")}

    await loop.until(released, "its box is released")


async def test_an_answer_is_shown_while_it_is_sampled(loop: Loop, make_config: MakeConfig) -> None:
    async def reads_streams() -> bool:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            answer = await http.get(f"http://127.0.0.1:{loop.stack.ports['adapter']}/health")
        return bool(answer.json()["status"] == "ok")

    await loop.until(reads_streams, "the adapter has imported its parsers")
    await loop.script("It counts: " + " ".join(map(str, range(60))), hold="counting", at=30)
    async with Talk(loop, make_config()) as talk:
        pieces = talk.chat.send("Count.")
        shown = ""
        while not shown.startswith("It counts"):  # the engine says nothing more before it is released
            piece = await asyncio.to_thread(next, pieces)
            assert not piece.is_thought
            shown += piece.text
        await loop.release("counting")
        rest = await asyncio.to_thread(list, pieces)
        assert "59" not in shown and (shown + "".join(piece.text for piece in rest)).endswith("59")


async def test_without_an_engine_it_says_so_and_waits(loop: Loop, make_config: MakeConfig) -> None:
    async def set_state(state: EngineState) -> None:
        async with loop.database.begin() as connection:
            await connection.execute(update(EngineTable).values(state=state))

    await loop.script("Back again.")
    async with Talk(loop, make_config()) as talk:
        try:
            await set_state(EngineState.STARTING)
            answering = asyncio.create_task(talk.send("Are you there?"))
            await talk.until_said("no engine of the set default is ready")
        finally:
            await set_state(EngineState.READY)
        assert await answering == "Back again."
    assert len([line for line in talk.said if "is ready" in line]) == 1


async def test_without_the_adapter_it_says_so_and_sends_the_message_again(loop: Loop, make_config: MakeConfig) -> None:
    await loop.script("lost", hold="adapter")
    async with Talk(loop, make_config()) as talk:
        answering = asyncio.create_task(talk.send("Are you there?"))
        await loop.until(lambda: has_call_at_engine(loop, talk.chat.rollout_id), "the engine has the call")
        loop.end("adapter", kill=True)
        await loop.release("adapter")
        await loop.forget_script()
        await loop.script("Here.")
        await talk.until_said("no answer from the adapter")
        loop.spawn("adapter")
        assert await answering == "Here."
    assert (await talk.ended()).num_turns == 1


async def has_call_at_engine(loop: Loop, rollout_id: int) -> bool:
    async with loop.database.begin() as connection:
        named = select(TurnTable.id).where(TurnTable.rollout_id == rollout_id, TurnTable.engine_id.is_not(None))
        return (await connection.execute(named)).first() is not None


async def test_a_message_that_is_too_long_is_forgotten(loop: Loop, make_config: MakeConfig) -> None:
    await loop.script("Short.")
    async with Talk(loop, make_config(sampling={"max_context_tokens": 200, "max_response_tokens": 50})) as talk:
        with pytest.raises(ValueError, match="prompt is too long"):
            await talk.send("word " * 400)
        assert await talk.send("hi") == "Short."
    assert len(talk.chat.messages) == 2


async def test_a_chat_whose_rollout_is_stopped_is_over(loop: Loop, make_config: MakeConfig) -> None:
    async with Talk(loop, make_config()) as talk:
        await asyncio.to_thread(Client(loop.home).cancel, talk.chat.rollout_id, "somebody needs the box")
        await talk.ended()
        with pytest.raises(ConfigError, match=r"the chat is over: its rollout has ended \(cancelled\)"):
            await talk.send("hi")


async def test_the_command_talks_with_the_policy_of_an_open_run(loop: Loop, make_config: MakeConfig) -> None:
    config = make_config()
    async with Talk(loop, config) as talk:
        pass
    run_id = (await talk.ended()).run_id
    assert (await served_config(loop.stack, run_id, None, "anna", print)).engine_set == config.engine_set
    await loop.script("Hello.\x1b[2J", "Hello again.")
    command = [sys.executable, "-m", "cli.main", "chat", run_id]
    pipe = asyncio.subprocess.PIPE
    environment = {**loop.environment, "COLUMNS": "80"}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=ROOT
    )
    out, err = await process.communicate(b"hi\n\n/new\nhi once more\n")
    assert process.returncode == 0, err.decode()
    assert out.decode() == "Hello.\N{REPLACEMENT CHARACTER}[2J\nHello again.\n"
    async with loop.database.begin() as connection:
        newest = select(RolloutTable.id).where(RolloutTable.run_id == run_id).order_by(RolloutTable.id.desc()).limit(1)
        rollout_id = (await connection.execute(newest)).scalar_one()
        turns = await read_turn_contents(connection, rollout_id, 10)
    assert [(one.after, [message["content"] for message in one.messages]) for one in turns] == [
        (None, ["hi"]),
        (None, ["hi once more"]),
    ]
    assert f"rollout {rollout_id}; /new begins" in err.decode()


async def test_the_viewers_pages_begin_send_and_end_a_chat(loop: Loop, make_config: MakeConfig) -> None:
    async with Talk(loop, make_config()) as talk:
        pass
    run_id = (await talk.ended()).run_id
    await loop.script("Hello <b>you</b>.", "Bye.")
    app = create_viewer_app(ViewerSettings(loop.database.url))
    add_chats(app, Client(loop.home))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=240) as browser,
    ):
        own = {"origin": "http://localhost"}
        for headers in ({}, {"origin": "http://localhost.example"}, {"origin": "null"}):
            assert (await browser.post(f"/runs/{run_id}/chat", headers=headers)).status_code == 403
        assert "Chat with its policy" in (await browser.get(f"/runs/{run_id}")).text
        begun = await browser.post(f"/runs/{run_id}/chat", headers=own)
        assert begun.status_code == 303, begun.text
        page, _, anchor = begun.headers["location"].partition("#")
        say, number = page + "/chat", int(page.rpartition("/")[2])
        assert anchor == "say" and 'id="say"' in (await browser.get(page)).text
        assert (await browser.post(say, headers=own, data={"text": "hi"})).status_code == 303
        shown = (await browser.get(page)).text
        assert "Hello &lt;b&gt;you&lt;/b&gt;." in shown and ">hi<" in shown
        assert (await browser.post("/rollouts/999/chat", headers=own, data={"text": "hi"})).status_code == 404
        assert (await browser.post(say, headers=own, data={"text": "x" * 70_000})).status_code == 413
        both = await asyncio.gather(*(browser.post(say, headers=own, data={"text": "bye"}) for _ in range(2)))
        assert sorted(one.status_code for one in both) == [303, 409]
        assert (await browser.post(say, headers=own, data={"end": "1"})).status_code == 303

        async def is_over() -> bool:
            return 'id="say"' not in (await browser.get(page)).text

        await loop.until(is_over, "the page offers no message")
        assert (await browser.post(say, headers=own, data={"text": "hi"})).status_code == 404
    assert await trained_of(loop, number) == 0
