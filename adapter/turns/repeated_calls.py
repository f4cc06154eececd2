"""Of several calls with the same digest, the one that a repeated request repeats.

An agent may ask for several samples of one history at once. If their connections break, each retry must get another
one of them: if all got the newest, the others would be lost, or sampled once more.
"""

from collections.abc import Callable
from dataclasses import dataclass

from adapter.conversation import Answer
from adapter.prompt.prompt_builder import PreparedCall
from adapter.turns.call_options import CallOptions
from adapter.turns.records import stored_answer
from adapter.turns.registry import RunningTurn, TurnRegistry
from ratchet.store import turns
from ratchet.store.database import Database
from ratchet.store.schema import TurnTable
from ratchet.store.turns import KnownCall
from ratchet.types import TurnState

_MOST = 64
"""Calls before the newest ones are not looked at: their clients have left long ago."""


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """A call, with what this process knows of it. `answer`: if it is completed. `made_for`: None if not known."""

    call: KnownCall
    running: RunningTurn | None
    answer: Answer | None
    made_for: CallOptions | None

    @classmethod
    def of(cls, call: KnownCall, registry: TurnRegistry) -> "EarlierCall":
        running = registry.get(call.id)
        answer = stored_answer(call) if call.state is TurnState.COMPLETED else None
        asked = None if answer is None else answer.asked
        stored = None if asked is None else CallOptions.from_json(asked)
        return cls(call, running, answer, stored if running is None else running.options)

    def has_key(self, call_key: str) -> bool:
        return bool(call_key) and self.made_for is not None and self.made_for.call_key == call_key

    @property
    def waits(self) -> bool:
        """Whether no client has got its answer, and none is connected."""
        is_attached = self.call.attached if self.running is None else bool(self.running.clients)
        return not self.call.delivered and self.call.state is not TurnState.ABORTED and not is_attached


async def repeated_call(
    database: Database,
    registry: TurnRegistry,
    session_id: int,
    prepared: PreparedCall,
    newest: KnownCall,
    fits: Callable[[EarlierCall], bool],
) -> KnownCall:
    """Return the call that a request with the digest of `newest` repeats.

    That is the call with the request's `Idempotency-Key`, else the oldest one that fits and whose answer no client has
    got, else the newest one.
    """
    if newest.ordinal == 0:
        return newest
    call_key = prepared.request.options.call_key
    where = (TurnTable.session_id == session_id) & (TurnTable.lane == prepared.lane)
    where &= (TurnTable.digest == prepared.digest) & (TurnTable.state != TurnState.ABORTED)
    if not call_key:
        where &= TurnTable.delivered.is_(False)
    async with database.begin() as conn:
        calls = [EarlierCall.of(call, registry) for call in await turns.find_calls(conn, where, _MOST)]
    named = next((one.call for one in calls if one.has_key(call_key)), None)
    waiting = next((one.call for one in reversed(calls) if one.waits and fits(one)), None)
    return named or waiting or newest
