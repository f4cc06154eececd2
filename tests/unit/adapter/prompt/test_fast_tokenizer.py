"""The fast tokenizer gives the ids of the model's own tokenizer on every code point and on adversarial texts, or is not
used.

One wrong id in a prompt, and the recorded context is not what the engine saw.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from adapter.prompt.fast_tokenizer import PATTERNS, FastTokenizer
from adapter.prompt.tokenizer import PolicyTokenizer
from tests.standins.tiny_model import make_tokenizer


def changed_tokenizer(tokenizer_json: str, **changes: Any) -> tuple[Tokenizer, dict[str, Any]]:
    description = json.loads(tokenizer_json)
    description["added_tokens"] = []
    for name, value in changes.items():
        description[name] = value
    return Tokenizer.from_str(json.dumps(description)), description


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    """4,000 tokens, trained on code and on prose in several scripts."""
    directory = tmp_path_factory.mktemp("bpe")
    texts = [file.read_text(errors="ignore") for file in sorted(Path(json.__file__).parents[1].glob("[a-d]*.py"))]
    prose = "Straße in München, déjà vu. Привет, мир! 東京都と大阪府。 안녕하세요 세계"
    texts += [prose + " \u0627\u0644\u0639\u0631\u0628 \U0001f600\U0001f601"] * 50
    make_tokenizer(directory, 4000, texts)
    return (directory / "tokenizer.json").read_text()


def ids_of(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)


@pytest.mark.parametrize("pattern", sorted(PATTERNS, key=len))
def test_every_character_in_the_places_that_patterns_look_at(tokenizer_json: str, pattern: str) -> None:
    steps = json.loads(tokenizer_json)["pre_tokenizer"]
    steps["pretokenizers"][0]["pattern"]["Regex"] = pattern
    tokenizer, description = changed_tokenizer(tokenizer_json, pre_tokenizer=steps)
    fast = FastTokenizer(tokenizer, description)
    # Planes 2 and 3 have only ideographs, in blocks of hundreds; those from 4 on have no characters but the marks at
    # the beginning of plane 14, or are for private use.
    numbers = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x40000, 7), *range(0xE0000, 0xE0200)]
    points = [chr(one) for one in [*numbers, *range(0x40000, 0x110000, 97)]]
    if "{1,3}" in pattern:  # it differs from another pattern only in how many digits it takes
        points = points[:0x3000]
    for start in range(0, len(points), 6000):
        text = "".join(f"a{one}'{one} {one}1" for one in points[start : start + 6000])
        assert np.array_equal(fast.encode(text), ids_of(tokenizer, text)), hex(start)


WORDS = [
    "'s", "'S", "'\u017f", "'LL", " ", "\t", "\n", "\r\n", "\x85", "\u3000", "\u00a0", 
    "e\u0301", "é", "\u0130", "ß", "١٢", "123",
    "x_y", "    return", "日本語", "\U0001f600", "\u200d", "\x00", "\u1e9b\u0323", "\u0344", "!?", "//",
]  # fmt: skip


@given(seed=st.integers(0, 2**32), drawn=st.text(max_size=80))
@settings(max_examples=500, deadline=None)
def test_random_texts(tokenizer_json: str, seed: int, drawn: str) -> None:
    tokenizer, fast = _tokenizers(tokenizer_json)
    rng = random.Random(seed)
    code = Path(__file__).read_text()
    start = rng.randrange(len(code))
    text = drawn + "".join(rng.choices(WORDS, k=rng.randrange(60))) + code[start : start + 300]
    assert np.array_equal(fast.encode(text), ids_of(tokenizer, text))


_CACHED: dict[str, tuple[Tokenizer, FastTokenizer]] = {}


def _tokenizers(tokenizer_json: str) -> tuple[Tokenizer, FastTokenizer]:
    if tokenizer_json not in _CACHED:
        tokenizer, description = changed_tokenizer(tokenizer_json)
        _CACHED[tokenizer_json] = tokenizer, FastTokenizer(tokenizer, description)
    return _CACHED[tokenizer_json]


def test_a_token_that_merging_cannot_reach_is_left_out(tokenizer_json: str) -> None:
    """`xy` + `z` is in the list, but `yz` merges first: the model's tokenizer never makes `xyz`, tiktoken would from x
    + yz.
    """
    description = json.loads(tokenizer_json)
    vocabulary: dict[str, int] = description["model"]["vocab"]
    last = max(vocabulary.values())
    vocabulary |= {"qk": last + 1, "kx": last + 2, "kxj": last + 3, "xj": last + 4, "qkx": last + 5}
    for text in ("qk", "kx", "kxj", "xj", "qkx"):
        assert text in vocabulary
    merges = [["q", "k"], ["k", "x"], ["kx", "j"], ["x", "j"], ["q", "kx"]]
    tokenizer, description = changed_tokenizer(
        json.dumps(description), model=description["model"] | {"merges": description["model"]["merges"] + merges}
    )
    text = "qkx qkxj kxj"
    assert np.array_equal(FastTokenizer(tokenizer, description).encode(text), ids_of(tokenizer, text))
    assert vocabulary["qkx"] not in ids_of(tokenizer, text)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        (
            {
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                }
            },
            "pattern",
        ),
        ({"normalizer": None}, ""),
    ],
)
def test_a_tokenizer_that_was_not_compared_is_not_used(tokenizer_json: str, changes: dict[str, Any], why: str) -> None:
    tokenizer, description = changed_tokenizer(tokenizer_json, **changes)
    if why:
        with pytest.raises(ValueError, match=why):
            FastTokenizer(tokenizer, description)
    else:
        text = "e\u0301 é"
        assert np.array_equal(FastTokenizer(tokenizer, description).encode(text), ids_of(tokenizer, text))


def test_merges_out_of_order_are_not_used(tokenizer_json: str) -> None:
    model = json.loads(tokenizer_json)["model"]
    tokenizer, description = changed_tokenizer(tokenizer_json, model=model | {"merges": model["merges"][::-1]})
    with pytest.raises(ValueError, match="order of its merges"):
        FastTokenizer(tokenizer, description)


def test_long_texts_are_left_to_the_models_own_tokenizer(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = PolicyTokenizer(tmp_path)
    assert tokenizer.slow_reason is None
    for text in (
        " " * 300_000,
        "a" * 60_000,
        "x" + tokenizer.alias["<|im_end|>"] + "y" * 2000 + tokenizer.alias["<think>"],
        "",
    ):
        assert np.array_equal(tokenizer.encode(text), tokenizer.encode_whole(text))
