"""Chats in the viewer: its only pages that write, and they write as `ratchet chat` does.

A chat is a rollout by hand: a workflow holds its box, the adapter makes its turns, no run trains them, and its page
shows them. Its conversation is kept in this process; if the process ends, the rollout's guard ends the rollout.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from client.chat import Chat, served_config
from client.session import Client, run_blocking
from ratchet.errors import ConfigError, RatchetError

_MAX_BYTES = 64 << 10
_T = TypeVar("_T")


def add_chats(app: FastAPI, client: Client) -> None:
    """Let the viewer's pages begin chats, send their messages and end them."""
    chats: dict[int, Chat] = {}
    busy = set[int]()
    routes = APIRouter(dependencies=[Depends(_require_own_page)])

    def begin_chat(what: str) -> Chat:
        config = run_blocking(served_config(client.stack, what, None, client.by, lambda line: None))
        return Chat(client, config, lambda line: None).__enter__()

    @routes.post("/runs/{what}/chat")
    async def begin(what: str) -> Response:
        chat = await _in_thread(lambda: begin_chat(what))
        chats[chat.rollout_id] = chat
        return _to_chat(chat.rollout_id)

    @routes.post("/rollouts/{rollout_id}/chat")
    async def say(request: Request, rollout_id: int) -> Response:
        form = await _form(request)
        if rollout_id not in chats:
            raise HTTPException(404, f"rollout {rollout_id} is no open chat of this viewer")
        if "end" in form:
            await _in_thread(chats.pop(rollout_id).__exit__)
            return _to_chat(rollout_id)
        if rollout_id in busy:
            raise HTTPException(409, "the model still answers the message before")
        busy.add(rollout_id)
        try:
            await _in_thread(lambda: list(chats[rollout_id].send(form.get("text", ""))))
        except HTTPException as error:
            if isinstance(error.__cause__, ConfigError):  # its rollout has ended
                chats.pop(rollout_id, None)
            raise
        finally:
            busy.discard(rollout_id)
        return _to_chat(rollout_id)

    app.include_router(routes)
    app.state.templates.globals["chats"] = chats


def _require_own_page(request: Request) -> None:
    """Refuse what a page of another site sends: browsers name the origin of each POST."""
    if urlsplit(request.headers.get("origin", "")).netloc != request.headers.get("host"):
        raise HTTPException(403, "a chat takes messages from the viewer's own pages only")


async def _form(request: Request) -> dict[str, str]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BYTES:
            raise HTTPException(413, f"a message has at most {_MAX_BYTES} bytes")
    return {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}


async def _in_thread(work: Callable[[], _T]) -> _T:
    try:
        return await asyncio.to_thread(work)
    except (RatchetError, ValueError) as error:
        raise HTTPException(409, str(error)) from error


def _to_chat(rollout_id: int) -> Response:
    return RedirectResponse(f"/rollouts/{rollout_id}#say", 303)
