"""The options of a call beside its history, as far as they decide whether its sample can answer a repeated request.

A repeated request may have other options than the call that it repeats. Those that act on sampling are the limit of
tokens, the stop sequences, and logprobs, which are kept only if they were asked for; at an endpoint also those that
act on the view, because the endpoint gets them. If these differ, what was sampled is no answer to the request, unless
it satisfies the new options as it is. Options that act only on the view (the choice of tools, formats, parallel calls)
are applied to the stored tokens anew. `stream` changes nothing.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from adapter.conversation import Answer, RequestOptions


class CallOptions(NamedTuple):
    """`max_tokens`: the limit that was in force, of the client's and the session's. `view`: digest of the options that
    act on the view. `call_key`: digest of the client's `Idempotency-Key`, "" without one."""

    max_tokens: int
    stop_sequences: tuple[str, ...]
    logprobs: bool
    view: str
    call_key: str

    @classmethod
    def of(cls, options: RequestOptions, max_tokens: int) -> "CallOptions":
        allowed = options.tool_choice.allowed
        view = [
            None if allowed is None else sorted(allowed),
            options.parallel_calls,
            options.output_schema,
            sorted(options.tool_forms.strict),
        ]
        digest = blake2b(orjson.dumps(view, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()
        return cls(max_tokens, options.stop_sequences, options.logprobs, digest, options.call_key)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "CallOptions":
        stops = tuple(value["stop_sequences"])
        return cls(value["max_tokens"], stops, value["logprobs"], value["view"], value["call_key"])

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


def fits(known: CallOptions | None, asked: CallOptions, answer: Answer | None, endpoint: bool) -> bool:
    """Return whether the sample of an earlier call can answer a repeated request.

    `known`: the earlier call's options; None if another process generates it: these count as equal.
    `answer`: the earlier one, None if it is not complete.
    """
    if known is None:
        return True
    if known.call_key and asked.call_key and known.call_key != asked.call_key:
        return False  # a client gives a retry the key of its call, and each new call a new key
    if known.stop_sequences != asked.stop_sequences or (asked.logprobs and not known.logprobs):
        return False
    if endpoint and known.view != asked.view:
        return False
    if known.max_tokens == asked.max_tokens:
        return True
    return answer is not None and answer.finish != "length" and answer.completion_tokens <= asked.max_tokens
