"""The tiny policy's tokenizer without the model: templates and transcripts are checked in seconds, training takes
minutes.
"""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from examples.tiny_policy.settings import NOISY_MIX, QUICKSTART, template_text
from examples.tiny_policy.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    rng = random.Random(3)
    tasks = QUICKSTART.new_tasks(rng)
    texts = [
        "".join(piece.text for piece in QUICKSTART.write_transcript(next(tasks), rng, NOISY_MIX)) for _ in range(300)
    ]
    return train_tokenizer(texts, 2000, template_text(), 2048)
