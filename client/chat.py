"""A chat with a policy: a person's messages as turns of a rollout by hand (`activities/chat.py`), never trained."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self
from uuid import uuid4

import httpx
import orjson
from sqlalchemy.ext.asyncio import AsyncConnection

from client.evaluating import EvaluationSettings, run_evaluation
from client.session import Client, run_blocking
from client.workflows import run_workflow
from ratchet.config import RunConfig
from ratchet.errors import ConfigError, FencedError, MachineError
from ratchet.lora_slots import FIRST_SLOT, version_in_label
from ratchet.payloads import RolloutInput, RolloutResult
from ratchet.progress import ReportProgress
from ratchet.run_names import plain_name, step_number
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import CHAT, MODEL_NAME, OPEN_STATES, EngineState, JsonObject
from reads.rollouts import read_rollout_head
from stack.parts import Stack
from store import runs, sessions
from store.engines import SILENT_SECONDS, list_engines
from store.names import find_named

_CHAT_SECONDS = 1800.0
_LOOK_SECONDS = 0.3
_AWAY_SECONDS = 2.0
_READ_SECONDS = 60.0
"""Longest silence of a stream; the adapter sends a comment every two seconds while a call waits."""
_OF_A_CALL = ("invalid_api_key", "request_timeout")
"""Codes of errors that are not about the message: it is sent again, in the rollout's newest session."""


class Piece(NamedTuple):
    """A part of an answer, as it is sampled."""

    text: str
    is_thought: bool


async def served_config(stack: Stack, what: str, config: Path | None, by: str, say: ReportProgress) -> RunConfig:
    """Return the config of a run whose policy the engines have: an open run, or a step that they have loaded.

    A run of zero steps without evaluations lets them load anything else. Raises ConfigError if that is refused.
    """
    run_id, _, step = plain_name(what).partition("@")
    async with stack.database() as database:
        async with database.begin() as connection:
            row = await runs.get_run(connection, run_id)
            if row is not None and row.lora_slot != FIRST_SLOT:
                raise ConfigError(f"{run_id} has LoRA slot {row.lora_slot}; a chat has slot {FIRST_SLOT} alone")
            if row is not None:
                number = step_number(step) if step else row.step
                version = None if number is None else await runs.newest_version(connection, run_id, number)
                engines = await list_engines(connection, row.engine_set)
                loaded = {version_in_label(one.version, row.lora_slot) for one in engines}
                is_open = row.state in OPEN_STATES
                if (is_open and not step) or (version is not None and loaded == {version.version}):
                    return row.resolved_config
        found = await run_evaluation(stack, what, EvaluationSettings(temperatures=(), config=config), by, say)
        return (await database.run(runs.the_run, found["run_id"])).resolved_config


def chat_values(config: RunConfig) -> JsonObject:
    """Return the config of the rollout, which may last half an hour at least and make any number of model calls."""
    values = config.model_dump(mode="json")
    values["harness"] |= {"generate": CHAT, "max_turns": None}
    values["limits"] |= {"agent_seconds": max(config.limits.agent_seconds, _CHAT_SECONDS), "guard_seconds": None}
    return values | {"init_from": None}  # engines answer a rollout by hand with what they have


class Chat:
    """A context manager: the rollout begins and ends with it. If this process is killed, the rollout's guard ends it.

    `messages`: the conversation, which each call sends whole; clear it to begin another one.
    """

    def __init__(self, client: Client, config: RunConfig, say: ReportProgress) -> None:
        self.messages: list[JsonObject] = []
        self.rollout_id = 0
        self._client = client
        self._config = config
        self._say = say
        self._workflow_id = f"rollout/adhoc/chat-{uuid4().hex[:8]}"
        self._token = ""
        self._told = ""
        self._http = httpx.Client(trust_env=False, timeout=_READ_SECONDS)

    def __enter__(self) -> Self:
        try:
            run_blocking(self._begin())
        except BaseException:  # Ctrl-C while it waits for a box, too
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()
        with suppress(ConfigError):  # it has ended by itself
            self._client.cancel(load_temporal_settings().own(self._workflow_id), "the chat is over")

    def send(self, text: str) -> Iterator[Piece]:
        """Yield the answer as it is sampled. While an engine or the adapter is away, say so once, and wait.

        Raises ValueError for a message that is refused, such as one that is too long, which is then forgotten, and
        ConfigError if the rollout has ended.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        self._told = ""
        while True:
            answer = ""
            try:
                for piece in self._pieces({"model": MODEL_NAME, "messages": asked, "stream": True}):
                    answer += "" if piece.is_thought else piece.text
                    yield piece
                self.messages = [*asked, {"role": "assistant", "content": answer}]
                return
            except (httpx.TransportError, ConnectionError) as error:
                self._tell(f"no answer from the adapter: {error}")
            time.sleep(_AWAY_SECONDS)
            run_blocking(self._begin())

    def _pieces(self, body: JsonObject) -> Iterator[Piece]:
        """Make one call. Raises TransportError, ConnectionError and ValueError."""
        url = f"{self._client.stack.addresses()['adapter']}/v1/chat/completions"
        with self._http.stream("POST", url, json=body, headers={"authorization": f"Bearer {self._token}"}) as reply:
            lines: Iterable[str] = reply.iter_lines()
            for line in lines if reply.is_success else [f"data: {reply.read().decode(errors='replace')}"]:
                if line.startswith(":"):
                    self._tell_what_is_away()
                elif line.startswith("data: {"):
                    value = orjson.loads(line.removeprefix("data: "))
                    if problem := value.get("error"):
                        is_ours = problem["type"] == "server_error" or problem["code"] in _OF_A_CALL
                        raise (ConnectionError if is_ours else ValueError)(problem["message"])
                    delta = value["choices"][0]["delta"]
                    for name in ("reasoning_content", "content"):
                        if delta.get(name):
                            yield Piece(delta[name], name != "content")

    def _tell_what_is_away(self) -> None:
        name = self._config.engine_set
        with suppress(MachineError):  # the store is away: the adapter holds the call, as it does for an engine
            engines = self._client.read(lambda connection: list_engines(connection, name))
            ready = any(one.state is EngineState.READY and one.silent_seconds < SILENT_SECONDS for one in engines)
            if not ready and self._config.endpoint is None:
                self._tell(f"no engine of the set {name} is ready (`ratchet status`)")

    def _tell(self, problem: str) -> None:
        if problem != self._told:
            self._say(f"{problem}; the message waits")
        self._told = problem

    async def _begin(self) -> None:
        """Start the rollout, or find it again, and take a token of its newest session. Raises ConfigError if over."""
        dataset = self._config.datasets[0].path
        wanted = RolloutInput(dataset=dataset, task=0, config=chat_values(self._config))
        stack, name = self._client.stack, self._workflow_id
        say = (lambda line: None) if self.rollout_id else self._say
        running = asyncio.create_task(run_workflow(stack, "Rollout", wanted, name, RolloutResult, say))
        try:
            async with stack.database() as database:
                while not running.done():
                    if await database.run(self._take_token, load_temporal_settings().own(name)):
                        return
                    await asyncio.wait({running}, timeout=_LOOK_SECONDS)
            raise ConfigError(f"the chat is over: its rollout has ended ({(await running).outcome})")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _take_token(self, connection: AsyncConnection, workflow_id: str) -> bool:
        named = await find_named(connection, workflow_id)
        head = await read_rollout_head(connection, named.id) if named is not None else None
        with suppress(FencedError):  # the attempt has no session yet, or it is closed
            if head is not None and head.outcome is None:
                self.rollout_id = head.id
                session_id = await sessions.session_id_of(connection, head.id, head.attempt)
                self._token = await sessions.add_token(connection, session_id)
                return True
        return False
