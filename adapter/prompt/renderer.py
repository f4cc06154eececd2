"""Render histories to exact prompt ids: sampled ids for answers that are recognised as sampled, tokenised template text
for the rest.

If a prompt differs from what the engine saw, the training data is wrong; this file is where that is prevented.

    prompt of turn n = [ opening … answer 1 … results … answer n-1 ] [ results ] [ generation prompt ]
                        `-- the stored stream, as ids -----------'  `-- tokenised: `continued` ----'

A recognised answer keeps the generation prompt that it was sampled after, and keeps its ids, unless the template drops
its thinking: then it is tokenised as shown. If a history cannot be rendered in segments, only the stored stream of its
last recognised answer keeps its ids (`resumed`), or nothing does (`full`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapter.conversation import Message, MessageRun, Preamble
from adapter.prompt.chat_template import ChatTemplate, TemplateRefusedError
from adapter.prompt.stream_tail import StreamTails
from adapter.prompt.template_segments import NotSegmentableError, TemplateSegments
from adapter.prompt.tokenizer import PolicyTokenizer
from ratchet.errors import ConfigError
from store.arrays import Ids


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """The ids that follow a stored stream.

    `drops`: because of them, the template drops the stream's thinking. `thinks`: an answer among them shows thinking.
    """

    ids: Ids
    drops: bool
    thinks: bool


@dataclass(frozen=True, slots=True)
class ComposedPrompt:
    """The ids of a whole prompt. `thinks`: an answer shows thinking. `dropped`: a sampled answer's was left out."""

    ids: Ids
    thinks: bool
    dropped: bool


class Renderer:
    """Template and tokenizer of one model directory. Thread-safe.

    `segments` is None if the template has no segments; `full_render_reason` says why.
    """

    def __init__(
        self, model_path: Path, template_kwargs: Mapping[str, Any] | None = None, stop_token_ids: Sequence[int] = ()
    ) -> None:
        """Read template and tokenizer, and check whether the template can be rendered in segments.

        `stop_token_ids`: ids that end an answer beside those of the model's files. Raises ConfigError if the directory
        cannot be used, or if the model has no such id.
        """
        self.model_path = model_path
        self.tokenizer = PolicyTokenizer(model_path)
        self.template = ChatTemplate(model_path, self.tokenizer.alias, template_kwargs or {})
        self.segments: TemplateSegments | None = None
        self.full_render_reason: str | None = None
        self._end_id: int | None = None
        try:
            segments = TemplateSegments(self.template)
            end_alias = self._end_alias(segments)
            self._check(segments)
        except NotSegmentableError as error:
            self.full_render_reason = str(error)
        else:
            self.segments = segments
            self._end_id = self.tokenizer.id_of(end_alias)
            self._text_after_end_token = segments.end[len(end_alias) :]
        end_ids = self.tokenizer.end_ids | ({self._end_id} if self._end_id is not None else set())
        self.stop_ids = tuple(sorted(end_ids.union(stop_token_ids)))
        for one in stop_token_ids:
            if not self.tokenizer.has_id(one):
                raise ConfigError(f"engine.stop_token_ids: the tokenizer in {model_path} has no token {one}")
        self._tails = StreamTails(self.template, self.tokenizer, self.stop_ids)
        if not self.stop_ids:
            raise ConfigError(f"{model_path} names no end token: put eos_token_id into its generation_config.json")

    def stopped(self, sampled: Ids) -> bool:
        """Return whether the model ended its answer with a stop token."""
        return len(sampled) > 0 and int(sampled[-1]) in self.stop_ids

    def ended(self, sampled: Ids) -> bool:
        """Return whether the answer ends with the template's end token or, in full rendering, one that may be it.

        After any other end the template's end token is added as context.
        """
        if not len(sampled):
            return False
        last_id = int(sampled[-1])
        return last_id in self._tails.boundary_ids if self._end_id is None else last_id == self._end_id

    def thinks(self, message: Message) -> bool:
        """Return whether a later question may change the text of this answer."""
        try:
            return self.segments is not None and self.segments.thinks(message)
        except NotSegmentableError:
            return True

    def full(self, preamble: Preamble, runs: Sequence[MessageRun]) -> Ids:
        """Render and tokenise everything, without sampled ids. Raises TemplateRefusedError."""
        text = self.template.render(preamble.messages(runs), preamble.tools, generation_prompt=True)
        return self.tokenizer.encode_whole(text)

    def written(self, preamble: Preamble, runs: Sequence[MessageRun], answer: Message) -> Ids:
        """Return the ids of an answer to this history, up to its stop token; none if the template writes none."""
        history = preamble.messages(runs)
        try:
            prompt = self.template.render(history, preamble.tools, generation_prompt=True)
            whole = self.template.render([*history, answer], preamble.tools)
        except TemplateRefusedError:
            return np.empty(0, np.int32)
        text = whole.removeprefix(prompt) if whole.startswith(prompt) else ""
        ids = self.tokenizer.encode(text, at_start=False)
        ends = np.flatnonzero(np.isin(ids, self.stop_ids))
        return ids[: int(ends[0]) + 1] if len(ends) else ids[:0]

    def resumed(self, preamble: Preamble, runs: Sequence[MessageRun], at: int, stream: Ids) -> Ids | None:
        """Return the ids that follow `stream`, which ends with answer runs[at], in a history that is rendered in full.

        None if they cannot be separated from the rest. Raises EarlierTextChangedError, TemplateRefusedError.
        """
        return self._tails.find(preamble, runs, at, int(stream[-1]))

    def continued(self, runs: Sequence[MessageRun], ended: bool) -> ContinuedPrompt:
        """Return the ids behind a stored stream whose last answer `runs` follow.

        `ended`: that answer ends with the template's end token. Raises NotSegmentableError.
        """
        segments = self._require_segments()
        behind = segments.render_behind(runs)
        shown = (run.messages[0] for run, kept in zip(runs, behind.kept, strict=True) if run.assistant and kept)
        thinks = any(segments.thinks(answer) for answer in shown)
        end = self._text_after_end_token if ended else segments.end
        text = end + "".join(behind.texts) + segments.generation
        return ContinuedPrompt(self.tokenizer.encode(text, at_start=False), behind.drops, thinks)

    def composed(self, preamble: Preamble, runs: Sequence[MessageRun], sampled: Mapping[int, Ids]) -> ComposedPrompt:
        """Return a whole prompt, with `sampled` ids by answer. Raises NotSegmentableError, TemplateRefusedError."""
        segments = self._require_segments()
        history = segments.render_history(preamble, runs)
        parts: list[Ids] = []
        texts: list[str] = []  # not one text that grows: each growth may copy it
        thinks = False
        dropped = False
        for at, run in enumerate(runs):
            thought = run.assistant and segments.thinks(run.messages[0])
            thinks = thinks or (thought and history.kept[at])
            if at in sampled and (history.kept[at] or not thought):
                before = self.tokenizer.encode("".join(texts) + segments.generation, at_start=not parts)
                parts += [before, sampled[at]]
                texts = [self._text_after_end_token if self.ended(sampled[at]) else segments.end]
            else:
                texts.append(history.texts[at])
                dropped = dropped or at in sampled
        parts.append(self.tokenizer.encode("".join(texts) + segments.generation, at_start=not parts))
        return ComposedPrompt(np.concatenate(parts), thinks, dropped)

    def _require_segments(self) -> TemplateSegments:
        if self.segments is None:
            raise NotSegmentableError(self.full_render_reason)
        return self.segments

    def _end_alias(self, segments: TemplateSegments) -> str:
        found = self.tokenizer.added.match(segments.end)
        if found is None:
            raise NotSegmentableError("an answer does not end with a token of its own")
        return found[0]

    def _check(self, segments: TemplateSegments) -> None:
        """Check that texts and ids are the sums of their segments' texts and ids. Raises NotSegmentableError."""
        for text in segments.check():
            if not np.array_equal(self.tokenizer.encode_whole(text), self.tokenizer.encode(text)):
                raise NotSegmentableError("tokenising depends on what stands before an added token")
