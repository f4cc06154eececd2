"""Record which sessions had a call refused, before its client hears of it, since a refused call has no turn.

An agent whose first call is refused ends without an answer; the agent stage says why it was.
"""

from collections import OrderedDict

from store import session_notes
from store.database import Database

_MOST_NOTED = 10_000


class RefusalNotes:
    """The first refusal of a session is written; later ones add nothing and do not wait for the store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._noted: OrderedDict[int, None] = OrderedDict()  # sessions, the least recently noted first

    async def note(self, session_id: int, reason: str) -> None:
        """Raises StoreUnavailableError; then it may be repeated."""
        if session_id in self._noted:
            return
        await self._database.run(session_notes.note_refusal, session_id, reason)
        self._noted[session_id] = None
        if len(self._noted) > _MOST_NOTED:
            self._noted.popitem(last=False)
