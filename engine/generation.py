"""The output of one call of the token route: whole, and as it grows."""

from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO

import numpy as np
import numpy.typing as npt

from ratchet.routed_experts import ExpertIds
from ratchet.types import JsonObject

_CLAMPED_LOGPROB = -9999.0
"""vLLM's value for a logprob that was NaN, -inf or missing."""
_NO_LABEL = "default"
"""vLLM's version of weights without a label. Tokens of such a version are never trained."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled output. `token_ids`: int32 (T,). `logprobs`: float32 (T,), or fewer if the engine gave fewer.

    `version_spans`: [{"version", "start", "end"}] over the output, end exclusive; the version is "default" on an engine
    without a label. `finish_reason`: stop, length or abort. A sampled stop id is the last of `token_ids`.
    `routed_experts`: those of prompt and output from the token on that the call asked for, without the last sampled
    token, which was not computed yet; None if the engine returns none.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    version_spans: list[JsonObject]
    finish_reason: str
    request_id: str = ""
    num_cached_tokens: int = field(default=0)
    routed_experts: ExpertIds | None = None

    def cut(self, length: int) -> "Generation":
        """Return the output up to its first `length` tokens."""
        spans = [span | {"end": min(span["end"], length)} for span in self.version_spans if span["start"] < length]
        experts = self.routed_experts
        if experts is not None:
            experts = experts[: max(0, len(experts) - max(0, len(self.token_ids) - length))]
        return replace(
            self,
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            version_spans=spans,
            routed_experts=experts,
        )

    @property
    def logprobs_valid(self) -> bool:
        """True if logprobs are finite and unclamped and spans cover all tokens; a span may lack a version label."""
        covered = 0
        for span in self.version_spans:
            if span["start"] != covered:
                return False
            covered = span["end"]
        complete = covered == len(self.token_ids) == len(self.logprobs) > 0
        return complete and bool(np.isfinite(self.logprobs).all() and (self.logprobs > _CLAMPED_LOGPROB).all())


class SampledTokens:
    """An output that grows, over one call or, if its engine is lost, over several that continue each other.

    `token_ids`: all so far. `finish_reason`: None until the call has ended.
    """

    def __init__(
        self,
        on_growth: Callable[[Sequence[int]], None] | None = None,
        version_of: Callable[[str], str | None] | None = None,
    ) -> None:
        """`on_growth` is called by `notify` with the ids that are new since its last call. `version_of`: the version
        of the call's LoRA slot in an engine's label, None without one; by default the label itself."""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._on_growth = on_growth
        self._version_of = version_of
        self._num_notified = 0
        self._logprobs: list[float] = []
        self._spans: list[JsonObject] = []
        self._num_labelled = 0
        self._request_id = ""
        self._num_cached = 0
        self._experts: ExpertIds | None = None

    def add(self, reply: JsonObject) -> None:
        """Add a whole reply, or one chunk of a stream. Raises KeyError, TypeError or ValueError for another form."""
        self._request_id = str(reply.get("request_id") or self._request_id)
        cached = ((reply.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        self._num_cached = cached or self._num_cached
        for choice in reply["choices"]:  # empty in a chunk with the usage alone
            self.token_ids += choice["token_ids"] or []
            entries = (choice.get("logprobs") or {}).get("content") or []
            self._logprobs += [np.nan if entry["logprob"] is None else entry["logprob"] for entry in entries]
            self._add_experts(choice.get("routed_experts"))
            if (finish_reason := choice.get("finish_reason")) is not None:
                self.finish_reason = finish_reason
                self._label(choice.get("weight_versions"))

    def notify(self) -> None:
        """Report the tokens that have come since the last notice."""
        if self._on_growth is not None and len(self.token_ids) > self._num_notified:
            new = self.token_ids[self._num_notified :]
            self._num_notified = len(self.token_ids)
            self._on_growth(new)

    def begin_again(self) -> None:
        """Forget the output so far, so that the next call makes a new one."""
        self.token_ids.clear()
        self._num_notified = 0
        self._logprobs.clear()
        self._spans.clear()
        self._num_labelled = 0
        self._experts = None
        self.finish_reason = None

    def continue_elsewhere(self) -> None:
        """Let the next call continue this output. Its versions are known only if the engine ended the call itself."""
        self._label(None)
        self.finish_reason = None

    def generation(self) -> Generation:
        """The output so far; its finish reason is `abort` if the call has not ended."""
        self._label(None)
        return Generation(
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            version_spans=self._spans,
            finish_reason=self.finish_reason or "abort",
            request_id=self._request_id,
            num_cached_tokens=self._num_cached,
            routed_experts=self._experts,
        )

    def _add_experts(self, data: str | None) -> None:
        """Add the experts of a call that has ended, in numpy's file format. Of a token that an earlier call computed,
        the experts of that call stay: with them the tokens after it were sampled."""
        if data is None:
            return
        found: ExpertIds = np.load(BytesIO(b64decode(data)), allow_pickle=False)
        before = self._experts
        self._experts = found if before is None else np.concatenate([before, found[len(before) :]])

    def _label(self, spans: list[JsonObject] | None) -> None:
        """Take over the version spans of the call that has just ended; without any, its tokens have no label."""
        start, end = self._num_labelled, len(self.token_ids)
        if start == end and self._spans:
            return
        found: list[JsonObject] = []
        for span in spans or [{"version": _NO_LABEL, "start": 0, "end": end - start}]:
            version, first, last = str(span["version"]), start + int(span["start"]), start + int(span["end"])
            if self._version_of is not None:
                version = self._version_of(version) or _NO_LABEL
            if found and found[-1]["version"] == version and found[-1]["end"] == first:
                found[-1]["end"] = last  # another slot got a version between them
            else:
                found.append({"version": version, "start": first, "end": last})
        self._spans += found
        self._num_labelled = end
