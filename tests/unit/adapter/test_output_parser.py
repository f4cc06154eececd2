"""An output with a stop sequence ends with the token that completes it, for any way the text was sampled."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.output_parser import OutputParser
from adapter.prompt.renderer import Renderer
from adapter.vllm_parsers import VllmParsers
from engine.generation import Generation

WORDS = st.text(st.sampled_from("ab \n:é日<|\U0001f600"), max_size=6)


@given(pieces=st.lists(WORDS, max_size=6), stops=st.lists(WORDS.filter(bool), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
async def test_an_output_ends_with_the_token_that_completes_a_stop_sequence(
    renderer: Renderer, model_dir: Path, pieces: list[str], stops: list[str]
) -> None:
    """The oracle reads token by token, as an engine does."""
    outputs = OutputParser(renderer, VllmParsers(model_dir, None, None))
    plain = renderer.tokenizer.plain
    ids = [one for piece in pieces for one in plain.encode(piece, add_special_tokens=False).ids]
    expected = len(ids)
    for number in range(len(ids) + 1):
        if any(stop in plain.decode(ids[:number], skip_special_tokens=False) for stop in stops):
            expected = number
            break
    assert await outputs.num_ids_until_stop(np.array(ids, np.int32), stops) == expected


def test_what_is_dropped_takes_its_logprobs_and_versions_along() -> None:
    spans = [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 5}]
    whole = Generation(np.arange(5, dtype=np.int32), np.full(5, -1, np.float32), spans, "stop")
    for length in range(1, 6):
        cut = whole.cut(length)
        assert cut.logprobs_valid and cut.token_ids.tolist() == list(range(length))
        assert cut.version_spans[-1]["end"] == length
    assert [span["version"] for span in whole.cut(2).version_spans] == ["a"]
    assert not Generation(whole.token_ids, whole.logprobs[:3], spans, "stop").cut(4).logprobs_valid
    experts = np.arange(14, dtype=np.uint8).reshape(7, 2, 1)  # of three tokens of the prompt, and of all but the last
    assert len(replace(whole, routed_experts=experts).cut(4).routed_experts) == 6  # type: ignore[arg-type]
    assert len(replace(whole, routed_experts=experts).cut(9).routed_experts) == 7  # type: ignore[arg-type]
