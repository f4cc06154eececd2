"""The tokenizer of a run's model, which turns token ids into texts."""

import threading
from functools import lru_cache
from pathlib import Path
from typing import Protocol


class DecodesIds(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@lru_cache(maxsize=4)
def _load(path: str) -> DecodesIds:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


_LOADING = threading.Lock()


def load_tokenizer(model_path: str) -> DecodesIds | None:
    """Return the model's tokenizer, None if its directory is gone or has none. Takes a second: call it in a thread."""
    path = Path(model_path) / "tokenizer.json"
    if not model_path or not path.is_file():
        return None
    with _LOADING:
        return _load(str(path))
