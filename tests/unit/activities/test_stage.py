"""Heartbeats of long activities, and the errors that Temporal stores."""

import asyncio
import dataclasses
import errno
import os
import socket
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import structlog
from sqlalchemy.exc import IntegrityError, NoResultFound
from temporalio.api.failure.v1 import Failure
from temporalio.converter import default
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import ActivityEnvironment

from activities.stage import BEGUN, activity_stage, heartbeating
from ratchet.errors import EngineRejectedError


async def test_heartbeats_do_not_wait_for_their_details() -> None:
    sent: list[tuple[Any, ...]] = []
    enough = asyncio.Event()
    asked: list[int] = []

    def note(*details: Any) -> None:
        sent.append(details)
        if len(sent) == 5:
            enough.set()

    async def progress() -> str:
        asked.append(len(asked))
        if len(asked) > 1:
            await asyncio.Event().wait()  # a store that does not answer
        return "3 turns"

    async def work() -> None:
        async with heartbeating(progress):
            await enough.wait()

    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, heartbeat_timeout=timedelta(seconds=0.03))
    environment.on_heartbeat = note
    async with asyncio.timeout(60):
        await environment.run(work)
    assert sent[0] == (BEGUN,) and sent[-1] == ("3 turns",) and len(asked) == 2


async def test_an_error_that_quotes_bytes_can_be_stored_by_temporal() -> None:
    @activity_stage("test")
    async def refuse() -> None:
        raise EngineRejectedError("no JSON: \0\udcff")

    with pytest.raises(ApplicationError) as raised:
        await ActivityEnvironment().run(refuse)
    assert raised.value.message == "no JSON: \\0\\udcff" and raised.value.type == "EngineRejectedError"
    await default().encode_failure(raised.value, Failure())


TOO_LARGE = "grpc: received message larger than max (5242880 vs. 4194304)"


def refused(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/data/model.safetensors")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (refused(errno.ENOSPC), "WorkerHostError", "/data/model.safetensors.: No space left on device"),
        (refused(errno.EDQUOT), "WorkerHostError", "quota"),
        (refused(errno.EROFS), "WorkerHostError", "Read-only file system"),
        (refused(errno.EIO), "WorkerHostError", "Input/output error"),
        (refused(errno.ESTALE), "WorkerHostError", "Stale file handle"),
        (refused(errno.EMFILE), "WorkerHostError", "Too many open files"),
        (refused(errno.EBUSY), "WorkerHostError", "busy"),
        (OSError(errno.ECONNREFUSED, "Connect call failed"), "WorkerHostError", "cannot reach another now: Connect"),
        (OSError(errno.ECONNRESET, "reset by peer"), "WorkerHostError", "reset by peer"),
        (OSError(errno.EPIPE, "Broken pipe"), "WorkerHostError", "Broken pipe"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "WorkerHostError", "unreachable"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "WorkerHostError", "No route"),
        (OSError(errno.ENETDOWN, "Network is down"), "WorkerHostError", "down"),
        (ConnectionResetError("Cannot write to closing transport"), "WorkerHostError", "closing transport"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "WorkerHostError", "Temporary failure"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "BugError", "not known"),
        (refused(errno.ENOENT), "BugError", "FileNotFoundError"),
        (refused(errno.EISDIR), "BugError", "IsADirectoryError"),
        (OSError("raised by code"), "BugError", "raised by code"),
        (RPCError("rate limited", RPCStatusCode.RESOURCE_EXHAUSTED, b""), "TemporalUnavailableError", "rate limited"),
        (RPCError("no right", RPCStatusCode.PERMISSION_DENIED, b""), "TemporalUnavailableError", "no right"),
        (RPCError("away", RPCStatusCode.UNAVAILABLE, b""), "TemporalUnavailableError", "away"),
        (RPCError("too large", RPCStatusCode.INVALID_ARGUMENT, b""), "BugError", "too large"),
        (RPCError(TOO_LARGE, RPCStatusCode.RESOURCE_EXHAUSTED, b""), "BugError", "larger than max"),
    ],
)
async def test_what_a_machine_or_temporal_refuses_now_is_tried_again(error: Exception, kind: str, words: str) -> None:
    @activity_stage("test")
    async def write() -> None:
        raise error

    with pytest.raises(ApplicationError, match=words) as raised:
        await ActivityEnvironment().run(write)
    assert raised.value.type == kind
    assert raised.value.non_retryable is (kind == "BugError")


def broken_reference(kind: type[asyncpg.PostgresError]) -> IntegrityError:
    wrapped = Exception("wrapped by SQLAlchemy's dialect")
    wrapped.__cause__ = kind("violates")
    return IntegrityError("INSERT", {}, wrapped)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoResultFound(), "FencedError"),
        (broken_reference(asyncpg.ForeignKeyViolationError), "FencedError"),
        (broken_reference(asyncpg.UniqueViolationError), "BugError"),
    ],
)
async def test_a_row_that_a_restored_store_lacks_fences_the_stage(error: Exception, kind: str) -> None:
    @activity_stage("test")
    async def write() -> None:
        raise error

    with pytest.raises(ApplicationError) as raised:
        await ActivityEnvironment().run(write)
    assert raised.value.type == kind


async def test_the_warning_about_an_outage_has_no_secrets() -> None:
    @activity_stage("test")
    async def ask() -> None:
        raise RPCError("refused postgresql://me:hunter22@db/x", RPCStatusCode.UNAVAILABLE, b"")

    with structlog.testing.capture_logs() as logs, pytest.raises(ApplicationError):
        await ActivityEnvironment().run(ask)
    assert [entry["event"] for entry in logs] == ["stage cannot go on now"]
    assert "hunter22" not in str(logs)
