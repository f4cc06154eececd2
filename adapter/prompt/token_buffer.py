"""Token streams that grow at their end: a conversation's prompts and outputs, kept once, however many turns it has.

Why here: copying a history of 86,000 ids for every turn costs more than tokenising what is new in it.
Called by: `tree.py`, `prompts.py` and `wire.py`, on the event loop.
"""

import msgspec
import numpy as np

from ratchet.store.arrays import Ids

_SPARE = 1.5  # a buffer that is too small gets half as much again; pages that nobody wrote to take no memory


class TokenBuffer:
    """Ids that are only ever appended. What stands in it never changes, so streams of any length may share it."""

    __slots__ = ("_ids", "used")

    def __init__(self, ids: Ids) -> None:
        self._ids, self.used = ids, len(ids)

    def first(self, length: int) -> Ids:
        """A view that nobody can write to."""
        view = self._ids[:length]
        view.flags.writeable = False
        return view

    def append(self, new: Ids) -> None:
        end = self.used + len(new)
        if end > len(self._ids) or not self._ids.flags.writeable:
            grown = np.empty(int(end * _SPARE), np.int32)
            grown[: self.used] = self._ids[: self.used]
            self._ids = grown
        self._ids[self.used : end] = new
        self.used = end

    def follows(self, length: int, new: Ids) -> bool:
        """Whether `new` stands behind the first `length` ids already."""
        end = length + len(new)
        return end <= self.used and np.array_equal(self._ids[length:end], new)


class TokenStream(msgspec.Struct, frozen=True, gc=False):
    """The first `length` ids of a buffer."""

    buffer: TokenBuffer
    length: int

    @staticmethod
    def of(ids: Ids) -> "TokenStream":
        return TokenStream(TokenBuffer(ids), len(ids))

    @property
    def ids(self) -> Ids:
        return self.buffer.first(self.length)

    def cut(self, length: int) -> "TokenStream":
        return TokenStream(self.buffer, length)

    def extended(self, new: Ids) -> "TokenStream":
        """This stream with `new` behind it: in place where nothing else stands there, or the same; else in a buffer of its own."""
        length = self.length + len(new)
        if self.length == self.buffer.used:
            self.buffer.append(new)
        elif not self.buffer.follows(self.length, new):
            return TokenStream.of(np.concatenate([self.ids, new]))
        return TokenStream(self.buffer, length)
