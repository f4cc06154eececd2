"""The engine is sent the prompt's ids, no matter how their text was put together."""

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from adapter.prompt.ids_json import IdsJson
from adapter.prompt.token_buffer import TokenStream
from engine.generate_request import IdsText, Sampling, generate_body

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


def sent(text: IdsText) -> list[int]:
    return list(orjson.loads(generate_body(text, Sampling(1, 1.0), "turn-1"))["token_ids"])


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 8), st.integers(0, 12), IDS), max_size=30))
def test_the_text_is_the_prompts_ids(calls: list[tuple[str, int, int, list[int]]]) -> None:
    """Prompts that extend any earlier one, or leave it, in alternating lanes."""
    text = IdsJson()
    streams = [TokenStream.of(np.zeros(0, np.int32))]
    plain: list[list[int]] = [[]]
    for lane, back, kept, new in calls:
        before = -1 - back % len(streams)
        length = min(kept, streams[before].length) if kept < 8 else streams[before].length
        plain.append(plain[before][:length] + new)
        streams.append(streams[before].cut(length).extended(np.array(new, np.int32)))
        assert sent(text.prompt_json(streams[-1], lane)) == plain[-1]
    assert [one.ids.tolist() for one in streams] == plain  # appending changed none of them


def test_a_list_can_be_written_in_one_go() -> None:
    assert sent(IdsText.of([5, 6])) == [5, 6] and sent(IdsText.of([])) == []
