"""The writes to a client of a stream, and their times: nothing that can be shown waits for the next change."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starlette.types import Message

from adapter.conversation import Answer, RequestOptions
from adapter.dialects.chat import ChatDialect
from adapter.live_answer import LiveAnswer, OutputMarks
from adapter.output_parser import OutputParser
from adapter.prompt.renderer import Renderer
from adapter.replies import StreamReply
from adapter.settings import AdapterSettings
from adapter.store_outage import StoreOutage
from adapter.turns.capture import Capture, PendingCall
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.registry import ConnectedClient
from adapter.turns.routing import EngineRouter
from adapter.vllm_parsers import VllmParsers
from store.database import Database


@dataclass
class Socket:
    """The text that a reply has written. A write does not end before `ready` is set."""

    text: str = ""
    is_writing: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Message) -> None:
        self.text += message["body"].decode()
        self.is_writing.set()
        await self.ready.wait()

    async def has(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in self.text:
                self.is_writing.clear()
                await self.is_writing.wait()


@dataclass
class Streaming:
    """A call whose answer is being sampled, and its reply. `feed` takes text of the answer."""

    client: ConnectedClient
    live: LiveAnswer
    socket: Socket
    feed: Callable[[str], None]


@pytest.fixture
async def streaming(renderer: Renderer, model_dir: Path) -> AsyncIterator[Streaming]:
    """Nothing in it needs the store, which is not there. No ping is sent."""
    url = "postgresql://nobody@127.0.0.1:1/none"
    async with Database(url) as database:
        parser = VllmParsers(model_dir, None, None)
        settings = AdapterSettings(database_url=url, model_path=model_dir, tool_parser=None)
        router = EngineRouter(database)
        outputs = OutputParser(renderer, parser)
        outage = StoreOutage(database)
        waits = EngineWaits(database, router, outage)
        capture = Capture(settings, database, renderer, outputs, router, outage, waits)
        tokenizer = renderer.tokenizer.plain
        live = LiveAnswer(tokenizer, renderer.stop_ids, OutputMarks(), (), has_tools=False)
        never: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        async def answer() -> Answer:
            return await never

        async def stay() -> None:
            await never

        sampling = asyncio.create_task(answer())
        disconnected = asyncio.create_task(stay())
        client, socket = ConnectedClient(), Socket()
        options = RequestOptions(dialect="chat", stream=True)
        reply = StreamReply(capture, ChatDialect(), PendingCall(options, 1, client, sampling), ping_seconds=3600)
        replying = asyncio.create_task(reply.wait(socket.send, disconnected))
        yield Streaming(
            client, live, socket, lambda text: live.feed(tokenizer.encode(text, add_special_tokens=False).ids)
        )
        for task in (replying, sampling, disconnected):
            task.cancel()


async def test_a_client_that_joins_sees_at_once_what_was_shown(streaming: Streaming) -> None:
    streaming.feed("one")
    streaming.socket.ready.set()
    streaming.client.connect(1, streaming.live)
    await streaming.socket.has("one")


async def test_what_is_shown_while_a_write_lasts_is_written_after_it(streaming: Streaming) -> None:
    streaming.client.connect(1, streaming.live)
    streaming.feed("one")
    await streaming.socket.has("one")
    shown = streaming.live.changed()
    streaming.feed(" two")
    await shown
    assert "two" not in streaming.socket.text
    streaming.socket.ready.set()
    await streaming.socket.has("two")
