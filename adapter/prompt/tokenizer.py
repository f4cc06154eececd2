"""The model's tokenizer: text with aliases → ids, ids → text with the tokens' own names.

- Every added token (`<|im_start|>`, `<tool_call>`, …) is renamed to an unguessable alias, in the template and in the
  tokenizer; its id stays. Text from users, files and tools cannot spell an alias, so it never becomes a control token.
- Tokenisation never crosses an added token. A text can therefore be cut at one, and long stretches between two of them
  are cached: the system text and the tools of a task are tokenised once per process, not once per rollout.
"""

import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adapter.prompt.fast_tokenizer import FastTokenizer
from ratchet.errors import ConfigError
from ratchet.model_directory import read_model_json
from store.arrays import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CACHED_FROM_CHARS = 1024  # tokenising a shorter stretch is faster than caching it
_MAX_CACHED_CHARS = 16_000_000


class PolicyTokenizer:
    """The tokenizer of one model directory.

    Thread-safe: the cache has a lock, and nothing else changes after construction.

    `plain`: the tokenizer with the tokens' own names. `alias`: added token → its alias. `added`: matches any alias.
    `slow_reason`: why the fast tokenizer is not used, None if it is.
    """

    def __init__(self, model_path: Path) -> None:
        """Raises ConfigError if the tokenizer is missing, another model's, or has tokens that cannot be renamed."""
        plain = read_model_json(model_path, "tokenizer.json")
        self.plain = _made(plain, model_path)
        nonce = secrets.token_hex(8)
        self.alias = {token["content"]: f"\x01{nonce}:{token['id']}\x02" for token in plain.get("added_tokens", [])}
        self._names = {alias: name for name, alias in self.alias.items()}
        self._tokenizer = _made(_renamed(plain, self.alias, model_path), model_path)
        self._fast: FastTokenizer | None = None
        self.slow_reason: str | None = None
        try:
            self._fast = FastTokenizer(self.plain, plain)
        except ValueError as error:
            self.slow_reason = str(error)
        self._added_ids = {alias: np.array([self.id_of(alias)], np.int32) for alias in self.alias.values()}
        self._some_alias = next(iter(self.alias.values()), "")
        self._marks_start = self._gives_others_at_start()
        self.added = re.compile("(" + ("|".join(map(re.escape, self.alias.values())) or r"(?!)") + ")")
        self.end_ids = frozenset(one for one in _end_ids(model_path) if self.has_id(one))
        self._require_fit(model_path)
        self._cache: OrderedDict[tuple[str, bool], Ids] = OrderedDict()
        self._cache_chars = 0
        self._lock = threading.Lock()

    def id_of(self, alias: str) -> int:
        found = self._tokenizer.token_to_id(alias)
        assert found is not None
        return int(found)

    def with_names(self, text: str) -> str:
        """The text with the added tokens' own names for their aliases."""
        return self.added.sub(lambda found: self._names[found[0]], text)

    def has_id(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is not None

    def _require_fit(self, model_path: Path) -> None:
        """Raise ConfigError if the model's vocabulary is smaller than the tokenizer's, without its added tokens."""
        config = read_model_json(model_path, "config.json", required=False)
        text = config.get("text_config")
        limit = (text if isinstance(text, dict) else config).get("vocab_size")
        size = self.plain.get_vocab_size(with_added_tokens=False)
        if isinstance(limit, int) and size > limit:
            raise ConfigError(
                f"tokenizer.json of {model_path} has {size:,} tokens, and vocab_size in config.json is {limit:,}: the "
                "files are of different models"
            )

    def encode(self, text: str, at_start: bool = True) -> Ids:
        """Return int32 [T], equal to `encode_whole` of the text.

        `at_start`: whether a prompt begins with the text. If not, it follows an added token, and some tokenizers, such
        as Mistral's, give other ids there: they put a blank before the text at the start only.
        """
        stretches = self.added.split(text)
        parts: list[Ids] = []
        for number, (stretch, alias) in enumerate(zip_longest(stretches[::2], stretches[1::2])):
            behind = self._marks_start and not (at_start and number == 0)
            parts.append(
                self._encode_stretch(stretch, behind)
                if len(stretch) < _CACHED_FROM_CHARS
                else self._encode_cached(stretch, behind)
            )
            if alias is not None:
                parts.append(self._added_ids[alias])
        return np.concatenate(parts)

    def _encode_stretch(self, text: str, behind: bool) -> Ids:
        """Encode text between added tokens. `behind`: one is before it, and the tokenizer gives other ids there."""
        if behind:
            return self.encode_whole(self._some_alias + text)[1:]
        ids = self._fast.encode(text) if self._fast is not None and text else None
        return self.encode_whole(text) if ids is None else ids

    def _gives_others_at_start(self) -> bool:
        """Return whether a text has other ids at the start than behind an added token."""
        if not self._some_alias:
            return False
        return any(
            not np.array_equal(self.encode_whole(text), self.encode_whole(self._some_alias + text)[1:])
            for text in ("a b", " a", "\na", "1")
        )

    def encode_whole(self, text: str) -> Ids:
        """Encode with the model's own tokenizer, uncached; its batch form releases the interpreter lock."""
        if not text:
            return np.zeros(0, np.int32)
        return np.array(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return text with the tokens' own names, as output parsers and clients read it."""
        return str(self.plain.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def _encode_cached(self, stretch: str, behind: bool) -> Ids:
        key = (stretch, behind)
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                return known
        ids = self._encode_stretch(stretch, behind)
        ids.flags.writeable = False
        with self._lock:
            if key not in self._cache:
                self._cache[key] = ids
                self._cache_chars += len(stretch)
            while self._cache_chars > _MAX_CACHED_CHARS:
                self._cache_chars -= len(self._cache.popitem(last=False)[0][0])
        return ids


def _made(description: dict[str, Any], model_path: Path) -> "Tokenizer":
    """Make the tokenizer that a tokenizer.json describes. Raises ConfigError if it describes none."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises no narrower class
        raise ConfigError(f"tokenizer.json of {model_path} describes no tokenizer: {error}") from error


def _renamed(tokenizer: dict[str, Any], alias: dict[str, str], model_path: Path) -> dict[str, Any]:
    """Return tokenizer.json with aliases for its added tokens. Raises ConfigError if one cannot cut prompts."""
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
    tokenizer["post_processor"] = None  # it would add begin tokens by name; the template writes them
    return tokenizer


def _end_ids(model_path: Path) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_model_json(model_path, name, required=False).get("eos_token_id")
        found.update(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))
    return found
