"""Bodies that a client has compressed, read within the limit of a body's size."""

import zlib

import zstandard

from adapter.dialects.base import InvalidRequestError
from adapter.replies import BodyTooLargeError, UnreadEncodingError

_GZIP_BITS = 16 + zlib.MAX_WBITS
_ZSTD_SLICE_BYTES = 1 << 10  # the reader has no limit of its own, and makes up to 32 MiB of a slice
_ZSTD_WINDOW_BYTES = 1 << 23  # the most that RFC 9659 allows in HTTP


def decoded(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the body without its `content-encoding`.

    Raises UnreadEncodingError, InvalidRequestError or BodyTooLargeError. Little more than `max_bytes` are decompressed.
    Takes a millisecond per MB or more: call it in a thread.
    """
    names = [name for one in encoding.lower().split(",") if (name := one.strip()) not in ("", "identity")]
    if not names:
        return body
    name = ", ".join(names)
    try:
        match name:
            case "gzip" | "x-gzip":
                return _inflated(body, name, _GZIP_BITS, max_bytes)
            case "deflate":
                # Some clients leave out zlib's head and checksum, with which HTTP's `deflate` begins and ends.
                has_head = len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0
                return _inflated(body, name, zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS, max_bytes)
            case "zstd":
                return _from_zstd(body, name, max_bytes)
    except (zlib.error, zstandard.ZstdError) as error:
        raise InvalidRequestError(f"content-encoding: the body is not {name}: {error}") from None
    raise UnreadEncodingError(
        f"content-encoding: {name[:100]!r} is not read here: send the body as it is, or with gzip, deflate or zstd"
    )


def _inflated(body: bytes, name: str, window_bits: int, max_bytes: int) -> bytes:
    reader = zlib.decompressobj(window_bits)
    data = reader.decompress(body, max_bytes + 1)
    return _checked(data, reader.eof and not reader.unused_data, name, max_bytes)


def _from_zstd(body: bytes, name: str, max_bytes: int) -> bytes:
    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
    data = bytearray()
    for at in range(0, len(body), _ZSTD_SLICE_BYTES):
        if reader.eof:
            raise InvalidRequestError(f"content-encoding: the body is not one whole {name} stream")
        data += reader.decompress(body[at : at + _ZSTD_SLICE_BYTES])
        if len(data) > max_bytes:
            break
    return _checked(bytes(data), reader.eof and not reader.unused_data, name, max_bytes)


def _checked(data: bytes, is_whole: bool, name: str, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise BodyTooLargeError(f"the request is larger than {max_bytes} bytes without its content-encoding")
    if not is_whole:
        raise InvalidRequestError(f"content-encoding: the body is not one whole {name} stream")
    return data
