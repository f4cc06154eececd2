"""Histories → exact prompt ids: sampled ids where an answer came back as sent, the template's text tokenised everywhere else.

Why here: a prompt that is only nearly what the engine saw poisons the training data; this file is the whole of that promise.
Called by: `prompts.py`, off the event loop where the text is long.

    prompt of turn n = [ opening … answer 1 … results … answer n-1 ] [ results ] [ generation prompt ]
                        `-- the stored stream, as ids -----------'  `-- tokenised: `continued` ----'

An answer that came back as sent stands with the generation prompt it was sampled after and with its sampled ids. The exception is
the template's own: where it drops the thinking of earlier answers, these are tokenised as it shows them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapter.conversation import Message, MessageRun, Preamble
from adapter.prompt.chat_template import ChatTemplate
from adapter.prompt.template_segments import NotSegmentableError, TemplateSegments
from adapter.prompt.tokenizer import PolicyTokenizer
from ratchet.errors import ConfigError
from ratchet.store.arrays import Ids


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """What follows a stored stream. `drops`: it takes the thinking out of what stands before. `thinks`: of its own answers, one
    whose thinking is shown."""

    ids: Ids
    drops: bool
    thinks: bool


@dataclass(frozen=True, slots=True)
class ComposedPrompt:
    """A whole prompt. `thinks`: some answer's thinking is shown. `dropped`: some sampled answer lost its thinking to the template."""

    ids: Ids
    thinks: bool
    dropped: bool


class Renderer:
    """Template and tokenizer of one model directory. Thread-safe."""

    def __init__(self, model_path: Path, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises ConfigError where the directory cannot be used. `full_because`: why every prompt is rendered whole, None if not."""
        self.tokens = PolicyTokenizer(model_path)
        self.template = ChatTemplate(model_path, self.tokens.alias, template_kwargs or {})
        self.pieces: TemplateSegments | None = None
        self.full_because: str | None = None
        self._end_id: int | None = None
        try:
            pieces = TemplateSegments(self.template)
            self._check(pieces)
        except NotSegmentableError as error:
            self.full_because = str(error)
        else:
            self.pieces = pieces
            self._end_id = self.tokens.id_of(self._end_alias(pieces))
            self._glue = pieces.end[len(self._end_alias(pieces)) :]
        self.stop_ids = tuple(sorted(self.tokens.end_ids | ({self._end_id} if self._end_id is not None else set())))
        if not self.stop_ids:
            raise ConfigError(f"{model_path} names no end token: put eos_token_id into its generation_config.json")

    def stopped(self, sampled: Ids) -> bool:
        """Whether the model ended its answer itself."""
        return len(sampled) > 0 and int(sampled[-1]) in self.stop_ids

    def ended(self, sampled: Ids) -> bool:
        """Whether it ended it as the template does; any other end is followed by the template's own, which is context."""
        return len(sampled) > 0 and int(sampled[-1]) == self._end_id

    def thinks(self, message: Message) -> bool:
        return self.pieces is not None and self.pieces.thinks(message)

    # ------------------------------------------------------------ prompts

    def full(self, head: Preamble, units: Sequence[MessageRun]) -> Ids:
        """The plain path: everything rendered and tokenised. Raises TemplateRefusedError."""
        messages = [*head.messages(), *(message for unit in units for message in unit.messages)]
        return self.tokens.encode_whole(self.template.render(messages, head.tools, generation_prompt=True))

    def continued(self, units: Sequence[MessageRun], ended: bool) -> ContinuedPrompt:
        """The ids behind a stored stream, whose last answer `units` follow. Raises NotLocalError, TemplateRefusedError."""
        pieces = self._pieces()
        texts, last = [], -1
        for at, unit in enumerate(units):
            text, drops = ("", False) if unit.assistant else pieces.others(unit)
            texts.append(text)
            last = at if drops else last
        thinks = False
        for at, unit in enumerate(units):
            if unit.assistant:
                texts[at] = pieces.answer(unit.messages[0], at > last)
                thinks = thinks or (at > last and pieces.thinks(unit.messages[0]))
        text = (self._glue if ended else pieces.end) + "".join(texts) + pieces.generation
        return ContinuedPrompt(self.tokens.encode(text), last >= 0, thinks)

    def composed(self, head: Preamble, units: Sequence[MessageRun], sampled: Mapping[int, Ids]) -> ComposedPrompt:
        """A whole prompt, in which `sampled` stand for the answers at these places. Raises NotLocalError, TemplateRefusedError."""
        pieces = self._pieces()
        laid = pieces.lay(head, units)
        parts: list[Ids] = []
        text, thinks, dropped = "", False, False
        for at, unit in enumerate(units):
            thought = unit.assistant and pieces.thinks(unit.messages[0])
            thinks = thinks or (thought and laid.kept[at])
            if at in sampled and (laid.kept[at] or not thought):
                parts += [self.tokens.encode(text + pieces.generation), sampled[at]]
                text = self._glue if self.ended(sampled[at]) else pieces.end
            else:
                text += laid.texts[at]
                dropped = dropped or at in sampled
        parts.append(self.tokens.encode(text + pieces.generation))
        return ComposedPrompt(np.concatenate(parts), thinks, dropped)

    # ------------------------------------------------------------ at start

    def _pieces(self) -> TemplateSegments:
        if self.pieces is None:
            raise NotSegmentableError(self.full_because)
        return self.pieces

    def _end_alias(self, pieces: TemplateSegments) -> str:
        found = self.tokens.added.match(pieces.end)
        if found is None:
            raise NotSegmentableError("an answer does not end with a token of its own")
        return found[0]

    def _check(self, pieces: TemplateSegments) -> None:
        """The text is the sum of its parts, and the ids are the same when the text is cut at added tokens."""
        self._end_alias(pieces)
        for text in pieces.check():
            cut = [self.tokens.encode_whole(stretch) for stretch in self.tokens.added.split(text)]
            if not np.array_equal(self.tokens.encode_whole(text), np.concatenate(cut)):
                raise NotSegmentableError("tokenising depends on what stands before an added token")
