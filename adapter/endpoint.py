"""The HTTP client of a server with OpenAI's Chat Completions, which answers an evaluation instead of the policy.

    failure                                                              error
    cannot connect, connection lost, silence, an unknown form            EndpointUnavailableError
    408, 409, 425, 429, 5xx: busy or broken                              EndpointUnavailableError
    3xx, 401, 402, 403, 404, any other 4xx, or a code in _USERS_CODES    the same, for a person: it names what to check
    400, 422 because the prompt is too long; 413                         EndpointContextError
    400, 422 for any other reason; 403, 451 because of the content       EndpointRejectedError

So a call waits until a person has mended a key or a quota, as it waits for an engine. Only what the server says about
the request itself is told to the agent, whose act it was: otherwise a policy could end its rollouts without a verdict.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from adapter.conversation import TokenLogprob, tool_of
from adapter.vllm_parsers import ParsedCall
from ratchet import secrets
from ratchet.config_sections import EndpointConfig
from ratchet.errors import ConfigError, EngineRejectedError, EngineUnavailableError
from ratchet.types import JsonObject

_TRANSIENT = (408, 409, 425, 429)
_CHECKS = {401: "endpoint.key", 402: "the account of endpoint.key", 403: "endpoint.key and endpoint.model"}
_USERS_CODES = ("invalid_api_key", "model_not_found", "authentication_error", "permission_error", "insufficient_quota")
"""Error codes and types of what the config names. Some servers answer 400 with them."""
_FLAGGED = re.compile(r"moderation|flagged|content.?(policy|filter)", re.I)
_TOO_LONG = re.compile(r"context.{0,20}(length|window|size)|maximum context|prompt is too long|too many tokens", re.I)
_TOKEN_COUNT = re.compile(r"\b\d{3,}\b")
_REASON_CHARS = 300
_CONNECT_SECONDS = 10.0


class EndpointUnavailableError(EngineUnavailableError):
    """No answer now. `retry_after_seconds`: its hint. `for_a_person`: key, account, address or model must be mended."""

    def __init__(self, message: str, retry_after_seconds: float | None = None, *, for_a_person: bool = False) -> None:
        super().__init__(secrets.without_secrets(message))
        self.retry_after_seconds = retry_after_seconds
        self.for_a_person = for_a_person


class EndpointRejectedError(EngineRejectedError):
    """The endpoint refused a request: `for_content` because of what is said in it, else perhaps because of its form."""

    def __init__(self, message: str, for_content: bool = False) -> None:
        super().__init__(message)
        self.for_content = for_content


class EndpointContextError(Exception):
    """The prompt does not fit into the context of the endpoint's model. `num_tokens`, `max_tokens`: None if unknown."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        counts = [int(one) for one in _TOKEN_COUNT.findall(message)]
        self.num_tokens = max(counts, default=None)
        self.max_tokens = min(counts) if len(counts) > 1 else None


@dataclass(slots=True)
class EndpointAnswer:
    """An answer of an endpoint, which comes as chunks, or whole as one of them. `finish`: its finish reason, None while
    there is none. `stop_sequence`: the one that ended it, if it says so. `logprobs`: as far as it returns them.

    The counts of tokens are the endpoint's own, 0 if it gives none.
    """

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    stop_sequence: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    _calls: dict[int, ParsedCall] = field(default_factory=dict)

    @property
    def calls(self) -> list[ParsedCall]:
        return [call for _, call in sorted(self._calls.items())]

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk. Raises KeyError, TypeError, ValueError or AttributeError for another form."""
        if usage := chunk.get("usage"):
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.completion_tokens = int(usage.get("completion_tokens") or 0)
            self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            self.reasoning_tokens = int((usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0)
        for choice in chunk["choices"][:1]:  # empty in a chunk with the usage alone
            part = choice.get("delta") or choice.get("message") or {}
            self.text += part.get("content") or ""
            self.reasoning += part.get("reasoning_content") or part.get("reasoning") or ""
            for number, call in enumerate(part.get("tool_calls") or []):
                at = int(call.get("index", number))
                name, arguments = self._calls.get(at, ("", ""))
                new = call["function"]
                self._calls[at] = ParsedCall(name + (new.get("name") or ""), arguments + (new.get("arguments") or ""))
            for one in (choice.get("logprobs") or {}).get("content") or []:
                self.logprobs.append(TokenLogprob(str(one["token"]), float(one["logprob"])))
            self.finish = choice.get("finish_reason") or self.finish
            if isinstance(stop := choice.get("stop_reason"), str):
                self.stop_sequence = stop


class EndpointClient:
    """Client of one endpoint. Safe to share between tasks of one event loop."""

    def __init__(self, endpoint: EndpointConfig) -> None:
        self._endpoint = endpoint
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(endpoint.silent_seconds, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=5),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def complete(self, request: JsonObject) -> EndpointAnswer:
        """Ask for one answer, as a stream, so that no server between may take a long one for silence.

        `request`: the body without the model's name. Raises as in the table above, and ConfigError if the key has no
        value here.
        """
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        merged = {"model": self._endpoint.model, **request, **streamed, **self._endpoint.body}
        body = orjson.dumps({name: value for name, value in merged.items() if value is not None})
        url = f"{self._endpoint.url}/chat/completions"
        try:
            async with self._http.stream("POST", url, content=body, headers=self._headers()) as reply:
                if reply.status_code >= 300:
                    await reply.aread()
                    raise self._error_of(reply.status_code, reply.text, reply.headers.get("retry-after"))
                return await self._read(reply)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointUnavailableError(f"{self._endpoint.url}: {_words(error)}") from error

    async def _read(self, reply: httpx.Response) -> EndpointAnswer:
        answer = EndpointAnswer()
        try:
            if not reply.headers.get("content-type", "").startswith("text/event-stream"):
                answer.add(self._checked(orjson.loads(await reply.aread())))
            else:
                async for line in reply.aiter_lines():
                    value = line.removeprefix("data:").strip()
                    if line.startswith("data:") and value != "[DONE]":
                        answer.add(self._checked(orjson.loads(value)))
            if answer.finish is None:
                raise EndpointUnavailableError(f"{self._endpoint.url}: the answer ended before it was complete")
            return answer
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EndpointUnavailableError(f"{self._endpoint.url} answered in an unknown form: {error!r}") from error

    def _checked(self, chunk: Any) -> JsonObject:
        """Return the chunk. Raises for one that is an error in the middle of a stream."""
        if isinstance(chunk, dict) and (error := chunk.get("error")):
            code = error.get("code") if isinstance(error, dict) else None
            status = code if isinstance(code, int) else 400 if _codes_of(chunk) & {"invalid_request_error"} else 500
            raise self._error_of(status, orjson.dumps(chunk).decode(), None)
        return dict(chunk)

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self._endpoint.key is not None:
            key = secrets.resolve_references("endpoint.key", self._endpoint.key)
            headers["authorization"] = f"Bearer {key}"
        return headers

    def _error_of(self, status: int, text: str, retry_after: str | None) -> Exception:
        reason = secrets.without_secrets(" ".join(_message_of(text).split()))[:_REASON_CHARS]
        words = f"{self._endpoint.url} answered {status}" + (f": {reason}" if reason else "")
        if status in _TRANSIENT or status >= 500:
            return EndpointUnavailableError(words, _seconds(retry_after))
        is_users = bool(_codes_of(_json_of(text)) & set(_USERS_CODES))
        if not is_users and (status == 413 or (status in (400, 422) and _TOO_LONG.search(text))):
            return EndpointContextError(reason)
        is_flagged = status == 451 or (status == 403 and _FLAGGED.search(text) is not None)
        if not is_users and (is_flagged or status in (400, 422)):
            return EndpointRejectedError(words, for_content=is_flagged)
        check = _CHECKS.get(status, "endpoint.url, endpoint.model and endpoint.key")
        return EndpointUnavailableError(f"{words}; check {check}", _seconds(retry_after), for_a_person=True)


async def check_endpoint(endpoint: EndpointConfig, temperatures: Sequence[float]) -> None:
    """Ask for short answers in the form of the rollouts' requests: with a tool, a limit and each temperature.

    Raises ConfigError if the endpoint does not take them, or if address, model or key are wrong; an endpoint that is
    only busy or away passes, because the rollouts wait for it.
    """
    client = EndpointClient(endpoint)
    messages = [{"role": "user", "content": "Answer with OK."}]
    try:
        for temperature in dict.fromkeys(temperatures):
            form = {"temperature": temperature, "max_tokens": 16, "tools": [tool_of("nothing", "Does nothing.")]}
            await client.complete({"messages": messages, **form})
    except (EndpointRejectedError, EndpointContextError) as error:
        raise ConfigError(f"endpoint: {error}; `endpoint.body` adds or leaves out fields of the requests") from None
    except EndpointUnavailableError as error:
        if error.for_a_person:
            raise ConfigError(f"endpoint: {error}") from None
    finally:
        await client.close()


def _json_of(text: str) -> Any:
    """Return the value of a JSON text, None if it is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _message_of(text: str) -> str:
    """Return the sentence in a body of OpenAI's or a similar form, else the body."""
    value = _json_of(text)
    while isinstance(value, dict) and (inner := value.get("error") or value.get("message") or value.get("detail")):
        value = inner
    return value if isinstance(value, str) else text


def _codes_of(body: Any) -> set[str]:
    """Return code and type in a body of OpenAI's or a similar form."""
    error = body.get("error", body) if isinstance(body, dict) else None
    found = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    return {one for one in found if isinstance(one, str)}


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a retry-after header; None for a date or nonsense."""
    try:
        return max(0.0, float(retry_after)) if retry_after else None
    except ValueError:
        return None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
