"""Bodies that a client has compressed, read within the limit of a body's size."""

import zlib

from adapter.dialects.base import InvalidRequestError
from adapter.replies import BodyTooLargeError

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def decoded(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the body without its `content-encoding`. Raises InvalidRequestError or BodyTooLargeError.

    No more than `max_bytes` are decompressed. Takes a millisecond per MB or more: call it in a thread.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in _WINDOW_BITS:
        raise InvalidRequestError(
            f"content-encoding: {name[:100]!r} is not read here: send the body as it is, or with gzip or deflate"
        )
    reader = zlib.decompressobj(_WINDOW_BITS[name])
    try:
        data = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"content-encoding: the body is not {name}: {error}") from None
    if len(data) > max_bytes:
        raise BodyTooLargeError(f"the request is larger than {max_bytes} bytes without its content-encoding")
    if not reader.eof or reader.unused_data:
        raise InvalidRequestError(f"content-encoding: the body is not one whole {name} stream")
    return data
