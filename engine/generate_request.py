"""The body of a request to vLLM's token route: what is to be sampled, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import orjson

from ratchet.lora_slots import FIRST_SLOT, slot_name
from ratchet.types import JsonObject

_STREAM_INTERVAL_TOKENS = 8
"""Tokens per chunk of a stream, so that a chunk's cost is shared; the first token comes alone."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one call. All others are sent as off, so that logprobs are of the plain softmax at T.

    `stop`: texts after which generation ends. They are compared with the sampled text and change no logprob.
    `experts_from`: the first token of the prompt whose experts are returned, by an engine that returns any.
    """

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    experts_from: int = 0

    def wire(self) -> JsonObject:
        """Return vLLM's `sampling_params`."""
        stop = {"stop": list(self.stop), "skip_special_tokens": False} if self.stop else {}
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(self.stop_token_ids),
            "seed": self.seed,
            "logprobs": 0,
            "detokenize": bool(self.stop),
            "routed_experts_prompt_start": self.experts_from,
            **stop,
        }


@dataclass(frozen=True, slots=True)
class IdsText:
    """A list of token ids as JSON text without its brackets, in pieces, so that a growing list is encoded only once."""

    pieces: tuple[bytes, ...]

    @staticmethod
    def of(ids: Sequence[int] | npt.NDArray[np.int32]) -> "IdsText":
        return IdsText(
            (orjson.dumps(np.ascontiguousarray(ids, dtype=np.int32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1],)
        )


def generate_body(
    ids: IdsText,
    sampling: Sampling,
    request_id: str,
    cache_salt: str | None = None,
    stream: bool = False,
    slot: int = FIRST_SLOT,
) -> bytes:
    """Return the body of a request to the token route; the ids come last and are copied once."""
    # A version's name has characters that vLLM refuses in a salt.
    salt = {"cache_salt": blake2b(cache_salt.encode(), digest_size=16).hexdigest()} if cache_salt else {}
    interval = {"stream_interval": _STREAM_INTERVAL_TOKENS} if stream else {}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    params = sampling.wire() | interval
    head = orjson.dumps(
        {
            "model": slot_name(slot),
            "request_id": request_id,
            "sampling_params": params,
            "stream": stream,
            **usage,
            **salt,
        }
    )
    return b"".join((head[:-1], b',"token_ids":[', *ids.pieces, b"]}"))
