"""The tiny policy's tokenizer: BPE with fewer than 2,000 entries, trained on transcripts.

Names and numbers must be one token each, because the small model cannot copy longer sequences reliably.
"""

import json
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# As in Qwen3 only these three are skipped when text is decoded; the tool and thinking marks are ordinary added tokens,
# which a tool parser must see.
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARK_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# A word with its space, punctuation with the newlines after it, newlines, other space.
PIECES = Regex(r" ?\w+| ?[^\s\w]+\n*|\n+|\s+(?!\S)|\s+")


def train_tokenizer(
    texts: Iterable[str], max_vocabulary: int, chat_template: str, max_context_tokens: int
) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocabulary,
        special_tokens=CONTROL_TOKENS + MARK_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    content = json.loads(bpe.to_str())
    for token in content["added_tokens"]:  # all of which the trainer marks as special; the marks are to be decoded
        token["special"] = token["content"] in CONTROL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=max_context_tokens,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
