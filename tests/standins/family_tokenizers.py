"""Tokenizers with the pre-tokenisers of the families that people train, made in a second.

The models' own files cannot be had here; these have the same steps, and a vocabulary of a few hundred tokens.
"""

import json
from pathlib import Path
from typing import Any, Literal, get_args

from tests.standins.tiny_model import QWEN_SPLIT, train_byte_level, training_texts

Kind = Literal["qwen", "llama3", "o200k", "deepseek", "kimi", "sentencepiece", "metaspace", "gemma"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-~]?[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "qwen": (QWEN_SPLIT,),
    "llama3": (_LLAMA3,),
    "o200k": (_O200K,),
    "deepseek": _DEEPSEEK,
    "kimi": (_KIMI,),
}


def make_family_tokenizer(directory: Path, kind: Kind, controls: list[str], stops: list[str], vocab: int = 600) -> None:
    """Write tokenizer.json, with `controls` as added tokens, and the files that name begin and end tokens."""
    from tokenizers import AddedToken, Tokenizer

    described = _byte_level(kind, vocab) if kind in _SPLITS else _sentencepiece(kind, vocab)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in dict.fromkeys(controls)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": stops[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [tokenizer.token_to_id(one) for one in dict.fromkeys(stops)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def _byte_level(kind: Kind, vocab: int) -> dict[str, Any]:
    # Tokens of whole words are not merged letter by letter in the vocabularies that come from tiktoken.
    from_tiktoken = kind in ("llama3", "o200k", "kimi")
    tokenizer = train_byte_level(_SPLITS[kind], vocab, training_texts(), kind == "qwen", ignore_merges=from_tiktoken)
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def _sentencepiece(kind: Kind, vocab: int) -> dict[str, Any]:
    """BPE over characters, in which `▁` is a blank, and a character without token is its bytes.

    Llama 2 and Phi-3 begin each stretch between two control tokens with a blank (`sentencepiece`), Mistral only the
    text (`metaspace`), Gemma nothing.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    decoded = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "sentencepiece":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        decoded.append(decoders.Strip(" ", 1, 0))
    elif kind == "metaspace":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        decoded.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoded)
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator((line for text in training_texts() for line in text.splitlines()), trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = found["model"]
    known = sorted(model["vocab"], key=model["vocab"].__getitem__)
    model["vocab"] = {token: number for number, token in enumerate([*first, *known])}
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    return found


def ids_of_letters(tokenizer: Any, text: str) -> list[int]:
    """Return one token or more per character, which no tokenizer would choose, with `text` as their meaning."""
    found: list[int] = []
    for letter in text:
        if tokenizer.token_to_id("<0x00>") is None:
            found += tokenizer.encode(letter, add_special_tokens=False).ids
        elif (known := tokenizer.token_to_id("▁" if letter == " " else letter)) is not None:
            found.append(known)
        else:
            found += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in letter.encode()]
    return found
