"""Find the earlier call that a request repeats: the newest with the same digest, unless a key names another."""

from dataclasses import dataclass

from adapter.conversation import Answer
from adapter.prompt.prompt_builder import PreparedCall
from adapter.turns.call_options import CallOptions
from adapter.turns.records import stored_answer
from adapter.turns.registry import RunningTurn, TurnRegistry
from ratchet.types import TurnState
from store import turns
from store.database import Database
from store.turns import KnownCall

_MOST = 64
"""The number of calls with the same digest that are searched, the newest ones."""


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


async def call_of_key(
    database: Database, registry: TurnRegistry, session_id: int, prepared: PreparedCall, newest: KnownCall
) -> KnownCall:
    """Return the call with the request's `Idempotency-Key` among those with the digest of `newest`, else `newest`."""
    call_key = prepared.request.options.call_key
    if not call_key or newest.ordinal == 0 or EarlierCall.of(newest, registry).has_key(call_key):
        return newest
    found = await database.run(turns.find_calls, session_id, prepared.lane, prepared.digest, _MOST)
    return next((one for one in found if EarlierCall.of(one, registry).has_key(call_key)), newest)
