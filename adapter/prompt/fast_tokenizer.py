"""A second tokenizer for the same vocabulary, several times as fast, used only if it is proven to give the same ids.

Tokenising its new text is the largest part of a turn's cost; tiktoken does it in a quarter of the time.

Both tokenizers merge neighbouring tokens, lowest rank first. The model's tokenizer merges the pairs of a list; tiktoken
merges any pair that gives a token. A merge never crosses a boundary that remains in the final result, so a token that
occurs in the result of any text is also the result for its own bytes alone. Hence both give the same ids if ranks are
in the order of the list and if tokens that are not the result for their own bytes are left out: `_reachable` asks the
model's tokenizer for each token. The split patterns remain; the tests compare them on every code point.
"""

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from store.arrays import Ids

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = frozenset({_GPT2, _QWEN2, _LLAMA3})
"""Split patterns for which both regex engines are known to give the same result."""
_OTHER_THAN_PLAIN = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_MAX_CHARS = 50_000  # tiktoken fails on several hundred thousand blanks in a row


class FastTokenizer:
    def __init__(self, tokenizer: Any, description: Mapping[str, Any]) -> None:
        """`description`: the parsed tokenizer.json of `tokenizer`. Raises ValueError if it cannot be used."""
        import tiktoken

        pattern = _pattern(description)
        self._normalizer = tokenizer.normalizer
        reachable = _reachable(tokenizer, description["model"])
        ranks = {bytes(map(_byte_values().__getitem__, text)): number for text, number in reachable.items()}
        self._encoding = tiktoken.Encoding("policy", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> Ids | None:
        """Return int32 [T] for a text without added tokens, or None if the text is too long for this tokenizer."""
        if len(text) > _MAX_CHARS:
            return None
        if self._normalizer is not None and not text.isascii():
            text = self._normalizer.normalize_str(text)
        return np.asarray(self._encoding.encode_ordinary(text), np.int32)


def _pattern(description: Mapping[str, Any]) -> str:
    """Return the split pattern of a plain byte-level BPE. Raises ValueError for any other tokenizer."""
    model, normalizer = description["model"], description.get("normalizer")
    if model.get("type") != "BPE" or any(map(model.get, _OTHER_THAN_PLAIN)):
        raise ValueError("unsupported tokenizer: not plain BPE")
    if model.get("byte_fallback") or model.get("ignore_merges"):
        raise ValueError("unsupported tokenizer: byte_fallback or ignore_merges is set")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise ValueError(f"unsupported tokenizer: its normalizer is {normalizer.get('type')}, not NFC")
    steps = (description.get("pre_tokenizer") or {}).get("pretokenizers") or []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        raise ValueError("unsupported tokenizer: its pre-tokenizer is not a split by a pattern into bytes")
    split, bytewise = steps
    pattern = split.get("pattern", {}).get("Regex")
    has_options = split.get("invert") or bytewise.get("add_prefix_space") or bytewise.get("use_regex")
    if split.get("behavior") != "Isolated" or has_options:
        raise ValueError("unsupported tokenizer: its pre-tokenizer has options that were not compared")
    if pattern not in PATTERNS:
        raise ValueError("unsupported tokenizer: its split pattern was not compared")
    return str(pattern)


def _reachable(tokenizer: Any, model: Mapping[str, Any]) -> dict[str, int]:
    """Map each token that its own bytes merge to → id. ValueError: ids not in merge order, or a byte without token."""
    from tokenizers import Tokenizer

    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merged_ids = [model["vocab"]["".join(pair)] for pair in merges]
    if any(later <= earlier for earlier, later in pairwise(merged_ids)):
        raise ValueError("unsupported tokenizer: its ids are not in the order of its merges")
    characters = _byte_values().keys()
    tokens = [text for text in model["vocab"] if characters >= set(text)]
    if sum(len(text) == 1 for text in tokens) != 256:
        raise ValueError("unsupported tokenizer: a byte has no token of its own")
    alone = Tokenizer(tokenizer.model)
    found = alone.encode_batch_fast(tokens, add_special_tokens=False)
    return {
        text: model["vocab"][text] for text, one in zip(tokens, found, strict=True) if one.ids == [model["vocab"][text]]
    }


@cache
def _byte_values() -> dict[str, int]:
    """Return the bytes for the characters of byte-level vocabularies."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
