"""Token streams that grow at their end: a conversation's prompts and outputs are stored once, for any number of turns.

Copying a history of 86,000 ids for each turn costs more than tokenising its new text. Streams are extended on the
event loop only; threads read them.
"""

import msgspec
import numpy as np

from store.arrays import Ids

_GROWTH = 1.5  # a buffer that is too small gets half as much again; pages that were never written take no memory


class TokenBuffer:
    """Ids that are only appended. Ids in the buffer never change, so streams of any length may share it."""

    __slots__ = ("_ids", "used")

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self.used = len(ids)

    def first(self, length: int) -> Ids:
        """A read-only view."""
        view = self._ids[:length]
        view.flags.writeable = False
        return view

    def append(self, new: Ids) -> None:
        end = self.used + len(new)
        if end > len(self._ids) or not self._ids.flags.writeable:
            grown = np.empty(int(end * _GROWTH), np.int32)
            grown[: self.used] = self._ids[: self.used]
            self._ids = grown
        self._ids[self.used : end] = new
        self.used = end

    def follows(self, length: int, new: Ids) -> bool:
        """Return whether the buffer has `new` behind its first `length` ids already."""
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
        """This stream with `new` behind it: in the same buffer if nothing else follows there, else in a copy."""
        length = self.length + len(new)
        if self.length == self.buffer.used:
            self.buffer.append(new)
        elif not self.buffer.follows(self.length, new):
            return TokenStream.of(np.concatenate([self.ids, new]))
        return TokenStream(self.buffer, length)
