"""The only HTTP client of vLLM: tokens in and out, pause and resume, the four-phase weight update, a probe of its routes.

Why here: vLLM's wire is no stable interface, so one file knows it, and one place turns its failures into our errors.
Called by: the adapter (generate), `engine/weight_update.py` and `push.py` (weights, canary) and the engine's wrapper (health, probe, recovery).

    failure                                         error
    cannot connect, connection lost, 5xx, 408, 429  EngineUnavailableError
    any other 4xx, an answer that is not its JSON   EngineRejectedError
    a route missing from /openapi.json              MachineError, naming it
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt
import orjson

from ratchet.errors import EngineRejectedError, EngineUnavailableError, MachineError

GENERATE, ABORT = "/inference/v1/generate", "/abort_requests"
ROUTES = (
    GENERATE,
    ABORT,
    "/health",
    "/pause",
    "/resume",
    "/is_paused",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_info",
    "/get_world_size",
)
_POOL_CALLS = 32
# vLLM writes this where a logprob was NaN, -inf or missing: a clamped logprob is no logprob.
CLAMPED_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """What one call samples with. Everything else is sent as "off", so that the logprobs are those of the plain softmax at T."""

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def wire(self) -> dict[str, Any]:
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
            "detokenize": False,
        }


@dataclass(frozen=True, slots=True)
class IdsText:
    """A list of ids as JSON text without its brackets, in pieces: whoever sends a growing list need not write it anew each time."""

    pieces: tuple[bytes, ...]

    @staticmethod
    def of(ids: Sequence[int] | npt.NDArray[np.int32]) -> "IdsText":
        return IdsText(
            (orjson.dumps(np.ascontiguousarray(ids, dtype=np.int32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1],)
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled output. `token_ids` int32 [T], `logprobs` float32 [T] or fewer where the engine gave fewer.

    `version_spans`: [{"version", "start", "end"}] over the output, end exclusive; the label is "default" on an unlabelled engine.
    `finish_reason`: stop, length or abort. A sampled stop id is the last of `token_ids`.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    version_spans: list[dict[str, Any]]
    finish_reason: str
    request_id: str = ""
    num_cached_tokens: int = field(default=0)

    @property
    def logprobs_valid(self) -> bool:
        """Complete and finite, not clamped, and the version spans cover every token; planning masks those of an unlabelled engine."""
        covered = 0
        for span in self.version_spans:
            if span["start"] != covered:
                return False
            covered = span["end"]
        complete = covered == len(self.token_ids) == len(self.logprobs) > 0
        return complete and bool(np.isfinite(self.logprobs).all() and (self.logprobs > CLAMPED_LOGPROB).all())


def generate_body(ids: IdsText, sampling: Sampling, request_id: str, cache_salt: str | None = None) -> bytes:
    """A request of the token route; the ids come last and are copied once."""
    # vLLM refuses the characters of a version's name in a salt.
    salt = {"cache_salt": blake2b(cache_salt.encode(), digest_size=16).hexdigest()} if cache_salt else {}
    head = orjson.dumps({"request_id": request_id, "sampling_params": sampling.wire(), "stream": False, **salt})
    return b"".join((head[:-1], b',"token_ids":[', *ids.pieces, b"]}"))


def _engine_request_id(request_id: str) -> str:
    """vLLM's own name for a request on the token route."""
    return f"generate-tokens-{request_id}"


@dataclass(slots=True)
class _Pool:
    http: httpx.AsyncClient
    num_calls: int = 0


class EngineClient:
    """Connections to one vLLM server at `address` (http://host:port). Safe to share between tasks of one event loop."""

    def __init__(self, address: str, timeout_seconds: float = 30) -> None:
        self.address, self._timeout_seconds = address.rstrip("/"), timeout_seconds
        self._pools: list[_Pool] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for pool in self._pools:
            await pool.http.aclose()

    @contextmanager
    def _pool(self) -> Iterator[httpx.AsyncClient]:
        """The first pool with room. httpx looks at all connections of a pool for every call: with a thousand in one that takes
        milliseconds each time."""
        pool = next((one for one in self._pools if one.num_calls < _POOL_CALLS), None)
        if pool is None:
            self._pools.append(pool := _Pool(self._new_pool()))
        pool.num_calls += 1
        try:
            yield pool.http
        finally:
            pool.num_calls -= 1

    def _new_pool(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.address,
            timeout=httpx.Timeout(self._timeout_seconds, connect=5),
            # uvicorn closes idle connections after 5 s: ours go first, or a call would now and then meet a closing one.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_POOL_CALLS, keepalive_expiry=2),
            trust_env=False,
            verify=self.address.startswith(
                "https:"
            ),  # else reading the machine's certificates would stop all calls for a moment
        )

    # ------------------------------------------------------------ tokens

    async def generate(
        self,
        ids: Sequence[int] | npt.NDArray[np.int32] | IdsText,
        sampling: Sampling,
        request_id: str,
        version: str | None = None,
    ) -> Generation:
        """Samples one continuation of `ids`. No time limit of its own: cancelling the task closes the connection, and vLLM aborts.
        `version` salts the prefix cache: blocks that other weights left there are never shared."""
        content = generate_body(ids if isinstance(ids, IdsText) else IdsText.of(ids), sampling, request_id, version)
        reply = await self._call("POST", GENERATE, content=content, timeout=httpx.Timeout(None, connect=5))
        try:
            return _generation(reply)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineRejectedError(
                f"engine {self.address} answered {GENERATE} in an unknown form: {error!r}"
            ) from error

    async def score(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Logprobs of ids[1:], each given all before it, at temperature 1: float32 [len(ids) - 1]."""
        prompt = np.ascontiguousarray(ids, dtype=np.int32)
        sampling = Sampling(max_tokens=1, temperature=1.0).wire() | {"prompt_logprobs": 0}
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": False}
        reply = await self._call("POST", GENERATE, body=body, timeout=httpx.Timeout(600, connect=5))
        positions = reply.get("prompt_logprobs") or []
        if len(positions) != len(prompt):
            raise EngineRejectedError(f"engine {self.address} scored {len(positions)} of {len(prompt)} prompt tokens")
        return np.array(
            [positions[at][str(token)]["logprob"] for at, token in enumerate(prompt.tolist()) if at], np.float32
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these calls of `generate`; unknown ones are ignored. With an empty list nothing is asked: vLLM would end all."""
        if request_ids:
            await self._call("POST", ABORT, body={"request_ids": [_engine_request_id(one) for one in request_ids]})

    # ------------------------------------------------------------ weights

    async def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """Freezes running requests. `keep` with `clear_cache` recomputes their caches on resume, so logprobs match the new weights."""
        await self._call("POST", "/pause", params={"mode": mode, "clear_cache": "true" if clear_cache else "false"})

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def is_paused(self) -> bool:
        return bool((await self._call("GET", "/is_paused"))["is_paused"])

    async def init_weight_transfer(self, root: str | None = None, nccl: Mapping[str, Any] | None = None) -> None:
        """Names the directory below which published policies lie (None: as before), and the NCCL group to join (None: none), in the fields
        of vLLM's NCCLWeightTransferInitInfo; with a group it answers once all its ranks are there. May be called again at any time.
        """
        info = {"root": root, "nccl": None if nccl is None else dict(nccl)}
        await self._call(
            "POST", "/init_weight_transfer_engine", body={"init_info": info}, timeout=httpx.Timeout(300, connect=5)
        )

    async def num_workers(self) -> int:
        """Processes of the engine that hold weights."""
        return int((await self._call("GET", "/get_world_size"))["world_size"])

    async def start_update(self) -> None:
        await self._call("POST", "/start_weight_update")

    async def update(self, files: Sequence[str], sha256: Sequence[str]) -> None:
        """Loads safetensors `files` (relative to the root). All digests are checked first: on a mismatch the weights stay as they
        are, the update is closed and EngineUnavailableError carries vLLM's words."""
        info = {"files": list(files), "sha256": list(sha256)}
        await self._call("POST", "/update_weights", body={"update_info": info}, timeout=httpx.Timeout(1800, connect=5))

    async def receive(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Takes these tensors, in this order, from rank 0 of the NCCL group; answers once all have come."""
        info = {"names": list(names), "dtype_names": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        await self._call("POST", "/update_weights", body={"update_info": info}, timeout=httpx.Timeout(1800, connect=5))

    async def finish_update(self, version: str | None) -> None:
        """Closes the update and labels the weights `version`; None keeps the label."""
        await self._call(
            "POST", "/finish_weight_update", body={"weight_version": version}, timeout=httpx.Timeout(600, connect=5)
        )

    async def set_version(self, version: str) -> None:
        """Labels the weights without changing them."""
        await self._call("POST", "/update_weight_version", body={"new_version": version})

    async def version(self) -> str | None:
        """The label of the weights; None where none was ever given."""
        label = (await self._call("GET", "/weight_info")).get("weight_version")
        return None if label in (None, "default") else str(label)

    # ------------------------------------------------------------ the server

    async def health(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            await self._call("GET", "/health", timeout=httpx.Timeout(10, connect=2))
        except (EngineUnavailableError, EngineRejectedError):
            return False
        return True

    async def probe(self) -> None:
        """Checks that the server has every route used here: raises MachineError with the first that is missing."""
        paths = (await self._call("GET", "/openapi.json")).get("paths", {})
        for route in ROUTES:
            if route not in paths:
                raise MachineError(
                    f"the engine at {self.address} has no route {route}; start it with `ratchet engine` "
                    "(vLLM 0.32 with --enable-scale-out and VLLM_SERVER_DEV_MODE=1)"
                )

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        params: dict[str, str] | None = None,
        timeout: httpx.Timeout | None = None,
        content: bytes | None = None,
    ) -> dict[str, Any]:
        """`content`: a body that is written already."""
        if body is not None:
            content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"content-type": "application/json"} if content is not None else {}
        if path != GENERATE:
            headers["connection"] = (
                "close"  # after an error of its own uvicorn closes a connection that it has just offered again
            )
        extra = {} if timeout is None else {"timeout": timeout}
        try:
            with self._pool() as http:
                reply = await http.request(method, path, content=content, headers=headers, params=params, **extra)  # type: ignore[arg-type]
        except httpx.TransportError as error:
            raise EngineUnavailableError(f"engine {self.address}{path}: {error!r}") from error
        if reply.status_code >= 500 or reply.status_code in (408, 429):
            raise EngineUnavailableError(
                f"engine {self.address}{path} answered {reply.status_code}: {reply.text[:500]}"
            )
        if reply.status_code >= 400:
            raise EngineRejectedError(f"engine {self.address}{path} refused ({reply.status_code}): {reply.text[:500]}")
        if not reply.content:
            return {}
        try:
            answer = orjson.loads(reply.content)
        except orjson.JSONDecodeError as error:
            raise EngineRejectedError(f"engine {self.address}{path} answered no JSON: {reply.text[:200]}") from error
        return answer if isinstance(answer, dict) else {}


def _generation(reply: dict[str, Any]) -> Generation:
    choice = reply["choices"][0]
    ids = np.array(choice["token_ids"] or [], np.int32)
    entries = (choice.get("logprobs") or {}).get("content") or []
    spans = choice.get("weight_versions") or [{"version": "default", "start": 0, "end": len(ids)}]
    return Generation(
        token_ids=ids,
        logprobs=np.array([np.nan if entry["logprob"] is None else entry["logprob"] for entry in entries], np.float32),
        version_spans=[
            {"version": str(span["version"]), "start": int(span["start"]), "end": int(span["end"])} for span in spans
        ],
        finish_reason=choice.get("finish_reason") or "abort",
        request_id=str(reply.get("request_id", "")),
        num_cached_tokens=((reply.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )
