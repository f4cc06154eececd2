"""Prompt ids as JSON text for the engine's request.

The text grows with a conversation instead of being written anew each turn.

Writing 86,000 numbers takes longer than everything else that a turn costs in the adapter.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import orjson

from adapter.prompt.token_buffer import TokenBuffer, TokenStream
from engine.generate_request import IdsText
from store.arrays import Ids

_MAX_LANES = 2  # per session: an agent and one sub-agent, about six bytes a token each


@dataclass(slots=True)
class _WrittenIds:
    """The text of the first `length` ids of a buffer, in pieces."""

    buffer: TokenBuffer
    length: int = 0
    texts: list[bytes] = field(default_factory=list)

    def extend_to(self, prompt: TokenStream) -> None:
        if prompt.length > self.length:
            self.texts.append(_numbers(prompt.ids[self.length :], first=not self.length))
            self.length = prompt.length
        # Joined when a piece is more than half as long as the one before: few pieces, and each number is copied a few
        # times in all.
        while len(self.texts) > 1 and 2 * len(self.texts[-1]) > len(self.texts[-2]):
            self.texts[-2:] = [b"".join(self.texts[-2:])]


@dataclass(slots=True)
class IdsJson:
    """The texts of one session's lanes. A prompt that does not extend the lane's last one is written in full."""

    _lanes: OrderedDict[str, _WrittenIds] = field(default_factory=OrderedDict)

    def prompt_json(self, prompt: TokenStream, lane: str) -> IdsText:
        written = self._lanes.pop(lane, None)
        if written is None or written.buffer is not prompt.buffer or written.length > prompt.length:
            written = _WrittenIds(prompt.buffer)
        written.extend_to(prompt)
        self._lanes[lane] = written
        while len(self._lanes) > _MAX_LANES:
            self._lanes.popitem(last=False)
        return IdsText(tuple(written.texts))


def _numbers(ids: Ids, first: bool) -> bytes:
    text = orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    return text if first else b"," + text
