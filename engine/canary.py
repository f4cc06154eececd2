"""Canary: a fixed text that learner and engine both score; if they disagree, the engine does not serve its label.

Version labels, checksums and digests can all pass although an engine computes with an old copy of a weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ratchet.types import JsonObject

TEXT = """\
def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

The test fails: median([]) raises IndexError, and the caller expects None.
"""
_MAX_TOKENS = 96
_MAX_MEAN_GAP = 0.1
"""The largest mean gap in nats per token: bfloat16 on both sides gives hundredths, an old tied output layer 0.5."""
_OLD_GAP_RATIO = 0.25
"""An engine whose scores are this much closer to the previous version has kept its weights, even after a small step."""


@dataclass(slots=True, frozen=True)
class CanaryVerdict:
    """The comparison of an engine's scores with the learner's.

    Gaps are |engine - learner| in nats per token. `reason`: why the engine does not serve the version, None if it does.
    """

    mean_gap: float
    max_gap: float
    reason: str | None


def canary_ids(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    ids: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return ids[:_MAX_TOKENS]


def canary_row(ids: Sequence[int], logprobs: npt.NDArray[np.float32]) -> JsonObject:
    """Return the JSON of column `policy_version.canary`: `logprobs[n]` is of `ids[n + 1]`, at temperature 1."""
    return {"ids": list(ids), "logprobs": [round(float(value), 6) for value in logprobs]}


def judge_canary(engine: npt.NDArray[np.float32], version: JsonObject, before: JsonObject | None) -> CanaryVerdict:
    """Decide whether an engine serves the version of its label.

    `engine`: its scores, float32 (T - 1,). `version`: the learner's canary of the labelled version. `before`: the
    canary of the version that the engine served until now, None if unknown.
    """
    gaps = np.abs(engine - np.array(version["logprobs"], dtype=np.float32))
    mean_gap = float(gaps.mean())
    max_gap = float(gaps.max())
    reason = None
    if not np.isfinite(mean_gap) or mean_gap > _MAX_MEAN_GAP:
        reason = (
            f"its logprobs differ from the learner's by {mean_gap:.3f} on average, at most {_MAX_MEAN_GAP} is noise"
        )
    elif before is not None and before["ids"] == version["ids"]:
        old_gap = float(np.abs(engine - np.array(before["logprobs"], dtype=np.float32)).mean())
        if old_gap < _OLD_GAP_RATIO * mean_gap:
            reason = f"it still serves the weights before: {old_gap:.2g} from theirs, {mean_gap:.2g} from the new ones"
    return CanaryVerdict(mean_gap, max_gap, reason)
