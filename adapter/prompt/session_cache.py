"""The sessions that this process serves, in memory: their turn trees and what was parsed of their requests.

Everything here can be read again from the store, so a session may be evicted or served elsewhere at any time.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from adapter.conversation import Message, answer_from_json
from adapter.prompt.ids_json import IdsJson
from adapter.prompt.incremental_parser import IncrementalParser
from adapter.prompt.preamble_cache import PreambleCache
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import HistoryRepairs
from adapter.turns.stored_views import views_of
from adapter.turns.tree import AttachPoint, TurnGrowth, TurnTree
from ratchet.types import TurnKind
from store import session_notes
from store.arrays import ids_from_bytes, unpack_json
from store.database import Database
from store.sessions import SessionRow
from store.turn_trees import TreeTurn, load_tree

_LOADED_AT_ONCE = 20  # turns between two chances for other calls to run


@dataclass(slots=True)
class LiveSession:
    """A session in memory. `num_calls`: turns in generation. `loaded`: the store has been read once for the tree.

    `recorded`: what earlier attempts have asked and this one has not yet (`turns/replay.py`); None: not read yet.
    `replayed`: turns that this process moved here, and when (monotonic). `stale`: words of their results that this
    attempt's results have others for.
    """

    row: SessionRow
    parser: IncrementalParser
    tree: TurnTree = field(default_factory=TurnTree)
    ids_json: IdsJson = field(default_factory=IdsJson)
    loaded: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_calls: int = 0
    recorded: list[Any] | None = None
    replayed: dict[int, float] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)

    @property
    def at_turn_limit(self) -> bool:
        """True if the turns that this process knows reach the session's limit; calls in flight are not counted."""
        limit = self.row.limits.get("max_turns")
        return limit is not None and self.tree.num_turns >= limit


@dataclass(eq=False)
class SessionCache:
    """`_restores`: put reasoning back that clients omit; None: if the template shows it.

    `_split`: takes thinking out of the text of an answer that came back.
    """

    _database: Database
    _renderer: Renderer
    _max_sessions: int
    _restores: bool | None = None
    _split: Callable[[Message], Message] | None = None

    def __post_init__(self) -> None:
        self._preambles = PreambleCache()
        if self._restores is None:
            self._restores = self._renderer.template.shows_reasoning
        self._sessions: OrderedDict[int, LiveSession] = OrderedDict()

    def get(self, row: SessionRow) -> LiveSession:
        """Return the session, made if missing; if there are too many, the oldest without calls is evicted."""
        session = self._sessions.get(row.id)
        if session is None:
            tree = TurnTree(not self._renderer.template.shows_call_ids)
            restore = tree.with_reasoning if self._restores and row.endpoint is None else None
            split = self._split if row.endpoint is None else None
            calls_of = tree.reasoning.calls_of if row.endpoint is None else None
            repairs = HistoryRepairs(restore, not self._renderer.template.shows_call_ids, split, tree.knows, calls_of)
            parser = IncrementalParser(self._preambles, repairs)
            session = self._sessions[row.id] = LiveSession(row, parser, tree)
        self._sessions.move_to_end(row.id)
        while len(self._sessions) > self._max_sessions:
            idle = next((key for key, one in self._sessions.items() if not one.num_calls and key != row.id), None)
            if idle is None:
                break
            del self._sessions[idle]
        return session

    async def load(self, session: LiveSession) -> bool:
        """Add to the tree the completed turns that the store has and the tree lacks; return whether there were any."""
        async with session.lock:
            template = self._renderer.template
            async with self._database.begin() as conn:
                stored = await load_tree(conn, session.row.id, list(session.tree.turn_ids()))
                if not session.loaded:
                    await session_notes.note_template(conn, session.row.rollout_id, template.digest, template.kwargs)
            for number, turn in enumerate(stored, start=1):
                self._add(session.tree, turn)
                if number % _LOADED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            session.loaded = True
            return bool(stored)

    def _add(self, tree: TurnTree, turn: TreeTurn) -> None:
        request = unpack_json(turn.request)
        answer = unpack_json(turn.answer)
        assert isinstance(request, dict) and isinstance(answer, dict)
        sampled = ids_from_bytes(turn.sampled_ids)
        stored = answer_from_json(turn.id, answer)
        growth = TurnGrowth(
            keys=[bytes.fromhex(key) for key in request["keys"]],
            answer=stored.message,
            lane=turn.lane,
            kind=TurnKind(turn.kind),
            ended=self._renderer.ended(sampled),
            thinks=request["thinks"] or stored.thinks,
            loose_key=bytes.fromhex(request["loose_key"]),
        )
        attach_point = AttachPoint(turn.parent_turn_id, turn.kept_tokens)
        prompt = tree.prompt(attach_point, ids_from_bytes(turn.suffix_ids))
        tree.add(turn.id, attach_point, prompt, sampled, growth)
        if "asked_again" in request:
            key, loose_key = map(bytes.fromhex, request["asked_again"])
            tree.add_view(turn.id, key, stored.message, loose_key)
        for view in views_of(answer):
            tree.add_view(turn.id, growth.keys[-1], view)
