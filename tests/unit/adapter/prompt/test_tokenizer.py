"""Tokenizer and renderer on their own: text never becomes a control token, and unusable directories are refused with a
sentence.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.conversation import Message, MessageRun, Preamble
from adapter.prompt.renderer import Renderer
from ratchet.errors import ConfigError
from tests.unit.adapter.client import HOSTILE

texts = st.lists(
    st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)), max_size=6
).map("".join)


@given(system=texts, question=texts, answer=texts, result=texts)
@settings(max_examples=150, deadline=None)
def test_text_never_becomes_a_control_token(
    renderer: Renderer, system: str, question: str, answer: str, result: str
) -> None:
    """There are as many turn starts as the template writes, for any texts."""
    runs = [
        MessageRun.of([Message("user", question)]),
        MessageRun.of([Message("assistant", answer)]),
        MessageRun.of([Message("tool", result)]),
    ]
    ids = renderer.full(Preamble.of(system, ()), runs)
    start, end = (renderer.tokenizer.plain.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    turns = 4 if system else 3
    assert int((ids == start).sum()) == turns + 1 and int((ids == end).sum()) == turns


@given(st.lists(texts, min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_cached_stretches_give_the_same_ids(renderer: Renderer, parts: list[str]) -> None:
    text = "".join(part * 40 + renderer.tokenizer.alias["<|im_end|>"] for part in parts)
    whole = renderer.tokenizer.encode_whole(text)
    assert np.array_equal(renderer.tokenizer.encode(text), whole)
    assert np.array_equal(renderer.tokenizer.encode(text), whole)  # from the cache


def test_a_directory_without_a_template_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((model_dir / "tokenizer.json").read_text())
    with pytest.raises(ConfigError, match="chat template"):
        Renderer(tmp_path)
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["lstrip"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="lstrip"):
        Renderer(tmp_path)


def test_further_stop_ids_are_those_of_the_models_tokenizer(model_dir: Path) -> None:
    own = Renderer(model_dir).stop_ids
    found = Renderer(model_dir, stop_token_ids=(5, own[0])).stop_ids
    assert found == tuple(sorted({*own, 5}))
    with pytest.raises(ConfigError, match=r"engine\.stop_token_ids: .* has no token 248046"):
        Renderer(model_dir, stop_token_ids=(248046,))
