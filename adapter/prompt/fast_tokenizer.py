"""A second tokenizer for the same vocabulary, several times as fast, used only where it is proven to give the same ids.

Why here: of a turn's cost, tokenising its new text is the greatest part; tiktoken does it in a quarter of the time.
Called by: `tokens.py`.

Both merge neighbouring tokens, lowest rank first. The model's tokenizer merges pairs from a list; tiktoken merges whatever gives a
token. Merges never cross a border that is there later, so a token that any text can contain is also what its own bytes alone merge
to. Hence both give the same ids if ranks are in the order of the list and tokens that their own bytes do not merge to are left out:
`_reachable` asks the model's tokenizer for each of them. That leaves the patterns, which the tests compare on every code point.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ratchet.store.arrays import Ids

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = frozenset({_GPT2, _QWEN2, _LLAMA3})
"""Patterns on which both regex engines are known to agree."""
_LONGEST = 50_000  # characters: tiktoken gives up on some hundred thousand blanks in a row


class FastTokenizer:
    def __init__(self, tokenizer: Any, description: Mapping[str, Any]) -> None:
        """`description`: the parsed tokenizer.json of `tokenizer`. Raises ValueError with what stands against it."""
        import tiktoken

        pattern, self._normalise = _pattern(description), tokenizer.normalizer
        ranks = {_bytes(text): number for text, number in _reachable(tokenizer, description["model"]).items()}
        self._encoding = tiktoken.Encoding("policy", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> Ids | None:
        """int32 [T] of a text without added tokens; None where it is better left to the other."""
        if len(text) > _LONGEST:
            return None
        if self._normalise is not None and not text.isascii():
            text = self._normalise.normalize_str(text)
        return np.asarray(self._encoding.encode_ordinary(text), np.int32)


def _pattern(description: Mapping[str, Any]) -> str:
    """Byte-level BPE over one of the known patterns and nothing else."""
    model, normalizer = description["model"], description.get("normalizer")
    if (
        model.get("type") != "BPE"
        or model.get("dropout")
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    ):
        raise ValueError("it is no plain BPE")
    if model.get("byte_fallback") or model.get("ignore_merges"):
        raise ValueError("it falls back to bytes, or ignores its merges")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise ValueError(f"its normalizer {normalizer.get('type')} is not known here")
    steps = (description.get("pre_tokenizer") or {}).get("pretokenizers") or []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        raise ValueError("it does not split by a pattern into bytes")
    split, bytewise = steps
    pattern = split.get("pattern", {}).get("Regex")
    if (
        split.get("behavior") != "Isolated"
        or split.get("invert")
        or bytewise.get("add_prefix_space")
        or bytewise.get("use_regex")
    ):
        raise ValueError("it splits in a way that is not known here")
    if pattern not in PATTERNS:
        raise ValueError("its pattern is not known here")
    return str(pattern)


def _reachable(tokenizer: Any, model: Mapping[str, Any]) -> dict[str, int]:
    """Tokens that their own bytes merge to. Raises ValueError where ids are not in the order of merges, or a byte has no token."""
    from tokenizers import Tokenizer

    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    made = [model["vocab"]["".join(pair)] for pair in merges]
    if any(later <= earlier for earlier, later in pairwise(made)):
        raise ValueError("its ids are not in the order of its merges")
    characters = _BYTES.keys()
    tokens = [text for text in model["vocab"] if characters >= set(text)]
    if sum(len(text) == 1 for text in tokens) != 256:
        raise ValueError("some byte has no token of its own")
    alone = Tokenizer(tokenizer.model)
    found = alone.encode_batch_fast(tokens, add_special_tokens=False)
    return {
        text: model["vocab"][text] for text, one in zip(tokens, found, strict=True) if one.ids == [model["vocab"][text]]
    }


def _byte_of() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones stand for themselves, the others from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + no): byte for no, byte in enumerate(others)}


_BYTES = _byte_of()


def _bytes(text: str) -> bytes:
    return bytes(_BYTES[character] for character in text)
