"""The model's tokenizer: text in aliases → ids, ids → text in the tokens' own names.

Why here: what may be cut where, and what can become a control token, is a property of the tokenizer alone.
Called by: `rendering.py`.

Two mechanisms:
- Every added token (`<|im_start|>`, `<tool_call>`, …) is renamed to an unguessable alias, in the template and in the
  tokenizer, ids unchanged. Text from users, files and tools cannot spell an alias, so it never becomes a control token.
- Tokenisation never crosses an added token. A text may therefore be cut at one, and long stretches between two of them are
  remembered: the system prompt and the tools of a task are tokenised once per process, not once per rollout.
"""

import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from adapter.prompt.fast_tokenizer import FastTokenizer
from adapter.prompt.model_files import read_json
from ratchet.errors import ConfigError
from ratchet.store.arrays import Ids

_REMEMBERED_FROM = 1024  # characters: shorter stretches are tokenised faster than looked up and kept
_REMEMBERED_CHARS = 16_000_000


class PolicyTokenizer:
    """Thread-safe: the memo has a lock, nothing else changes after construction."""

    def __init__(self, model_path: Path) -> None:
        """Raises ConfigError where the directory lacks a tokenizer, or where its added tokens cannot be renamed."""
        from tokenizers import Tokenizer

        plain = read_json(model_path, "tokenizer.json")
        self.plain = Tokenizer.from_str(json.dumps(plain))
        nonce = secrets.token_hex(8)
        self.alias = {token["content"]: f"\x01{nonce}:{token['id']}\x02" for token in plain.get("added_tokens", [])}
        self._tokenizer = Tokenizer.from_str(json.dumps(_renamed(plain, self.alias, model_path)))
        self._fast, self.slow_because = _fast(self.plain, plain)
        self._added_ids = {alias: np.array([self.id_of(alias)], np.int32) for alias in self.alias.values()}
        self.added = re.compile("(" + ("|".join(map(re.escape, self.alias.values())) or r"(?!)") + ")")
        self.end_ids = frozenset(_end_ids(model_path))
        self._memo: OrderedDict[str, Ids] = OrderedDict()
        self._memo_chars, self._lock = 0, threading.Lock()

    def id_of(self, alias: str) -> int:
        found = self._tokenizer.token_to_id(alias)
        assert found is not None
        return int(found)

    def encode(self, text: str) -> Ids:
        """int32 [T], the same as of the text in one go (`encode_whole`)."""
        stretches = self.added.split(text)
        parts: list[Ids] = []
        for stretch, alias in zip_longest(stretches[::2], stretches[1::2]):
            parts.append(self._stretch(stretch) if len(stretch) < _REMEMBERED_FROM else self._remembered(stretch))
            if alias is not None:
                parts.append(self._added_ids[alias])
        return np.concatenate(parts)

    def _stretch(self, text: str) -> Ids:
        """Of a text without added tokens."""
        ids = self._fast.encode(text) if self._fast is not None and text else None
        return self.encode_whole(text) if ids is None else ids

    def encode_whole(self, text: str) -> Ids:
        """Without memo, and by the model's own tokenizer. Its batch form, unlike `encode`, releases the interpreter's lock."""
        if not text:
            return np.zeros(0, np.int32)
        return np.array(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Text under the tokens' own names: what output parsers and clients read."""
        return str(self.plain.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def _remembered(self, stretch: str) -> Ids:
        with self._lock:
            known = self._memo.get(stretch)
            if known is not None:
                self._memo.move_to_end(stretch)
                return known
        ids = self._stretch(stretch)
        ids.flags.writeable = False
        with self._lock:
            if stretch not in self._memo:
                self._memo[stretch] = ids
                self._memo_chars += len(stretch)
            while self._memo_chars > _REMEMBERED_CHARS:
                self._memo_chars -= len(self._memo.popitem(last=False)[0])
        return ids


def _fast(tokenizer: Any, description: dict[str, Any]) -> tuple[FastTokenizer | None, str | None]:
    """The fast one, or why there is none."""
    try:
        return FastTokenizer(tokenizer, description), None
    except ValueError as error:
        return None, str(error)


def _renamed(tokenizer: dict[str, Any], alias: dict[str, str], model_path: Path) -> dict[str, Any]:
    """tokenizer.json with its added tokens under their aliases."""
    for token in tokenizer.get("added_tokens", []):
        flags = [flag for flag in ("lstrip", "rstrip", "single_word", "normalized") if token.get(flag)]
        if flags:
            raise ConfigError(
                f"added token {token['content']!r} of {model_path} is {', '.join(flags)}: prompts cannot be cut at it"
            )
        token["content"] = alias[token["content"]]
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        for name, renamed in alias.items():
            if name in vocabulary:
                vocabulary[renamed] = vocabulary.pop(name)
    tokenizer["post_processor"] = None  # adds begin tokens by name; the template writes them itself
    return tokenizer


def _end_ids(model_path: Path) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(model_path, name, required=False).get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return found
