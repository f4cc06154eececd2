"""The byte layout of the store's bytea columns: little-endian int32 ids, float32 logprobs and float16 values of
trained tokens, numpy's own file format for experts, zstd for text and JSON."""

from collections.abc import Sequence
from io import BytesIO

import numpy as np
import numpy.typing as npt
import orjson
import zstandard

from ratchet.routed_experts import ExpertIds
from ratchet.token_statistics import Halves

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


def ids_to_bytes(ids: Sequence[int] | Ids) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_from_bytes(data: bytes) -> Ids:
    return np.frombuffer(data, dtype="<i4")


def logprobs_to_bytes(logprobs: Sequence[float] | Logprobs) -> bytes:
    return np.asarray(logprobs, dtype="<f4").tobytes()


def logprobs_from_bytes(data: bytes) -> Logprobs:
    return np.frombuffer(data, dtype="<f4")


def halves_to_bytes(values: Halves) -> bytes:
    return values.astype("<f2").tobytes()


def halves_from_bytes(data: bytes) -> Halves:
    return np.frombuffer(data, dtype="<f2")


def experts_to_bytes(experts: ExpertIds) -> bytes:
    """Write shape and dtype, too: the store does not know the model."""
    buffer = BytesIO()
    np.save(buffer, experts, allow_pickle=False)
    return buffer.getvalue()


def experts_from_bytes(data: bytes) -> ExpertIds:
    experts: ExpertIds = np.load(BytesIO(data), allow_pickle=False)
    return experts


def pack_text(text: str | bytes) -> bytes:
    """Compress with zstd at level 3, at which a git patch or a log shrinks three to ten times at about 300 MB/s."""
    return zstandard.compress(text.encode(errors="backslashreplace") if isinstance(text, str) else text)


def unpack_text(data: bytes) -> str:
    return zstandard.decompress(data).decode(errors="replace")


def unpack_bytes(data: bytes) -> bytes:
    return zstandard.decompress(data)


def pack_json(value: object) -> bytes:
    return zstandard.compress(orjson.dumps(value))


def unpack_json(data: bytes) -> object:
    return orjson.loads(zstandard.decompress(data))
