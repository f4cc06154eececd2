"""Prompt ids as the engine's route takes them, a JSON list, that grows with a conversation instead of being written again.

Why here: writing 86,000 numbers takes longer than all else that a turn costs here.
Called by: `capture.py`, once per generation.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import orjson

from adapter.prompt.token_buffer import TokenBuffer, TokenStream
from engine.client import IdsText
from ratchet.store.arrays import Ids

_LANES = 2  # remembered per session: an agent and one sub-agent; about six bytes a token each


@dataclass(slots=True)
class _Written:
    """The first `length` ids of a buffer."""

    buffer: TokenBuffer
    length: int = 0
    texts: list[bytes] = field(default_factory=list)

    def reach(self, prompt: TokenStream) -> None:
        if prompt.length > self.length:
            self.texts.append(_numbers(prompt.ids[self.length :], first=not self.length))
            self.length = prompt.length
        while len(self.texts) > 1 and 2 * len(self.texts[-1]) > len(self.texts[-2]):
            self.texts[-2:] = [b"".join(self.texts[-2:])]  # few texts, and each number is copied a few times in all


@dataclass(slots=True)
class IdsJson:
    """One session's. A prompt that does not go on from the lane's last one is written whole."""

    _last: OrderedDict[str, _Written] = field(default_factory=OrderedDict)

    def of(self, prompt: TokenStream, lane: str) -> IdsText:
        written = self._last.pop(lane, None)
        if written is None or written.buffer is not prompt.buffer or written.length > prompt.length:
            written = _Written(prompt.buffer)
        written.reach(prompt)
        self._last[lane] = written
        while len(self._last) > _LANES:
            self._last.popitem(last=False)
        return IdsText(tuple(written.texts))


def _numbers(ids: Ids, first: bool) -> bytes:
    text = orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    return text if first else b"," + text
