"""Encrypt what Temporal stores: arguments, results, signals, updates, queries, memos, heartbeats and failures.

RATCHET_PAYLOAD_KEY_FILE names a file with one key per line, `ID:KEY`; KEY is 32 bytes in base64. The last line
encrypts, every line decrypts, so a key is replaced by adding a line. The file is read again if a payload needs a key
that is not known. Payloads without encryption pass, so that a run that was started without the file goes on with it.

Workflow ids, names of workflows and activities, and search attributes are not payloads; Temporal reads them itself.
"""

import asyncio
import base64
import binascii
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError
from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import DataConverter, DefaultFailureConverterWithEncodedAttributes, PayloadCodec

from ratchet.errors import ConfigError, MachineError
from ratchet.storable_values import storable_parts

KEY_FILE_SETTING = "RATCHET_PAYLOAD_KEY_FILE"
_ENCODING, _KEY_ID = "encoding", "encryption-key-id"
_ENCRYPTED = b"binary/encrypted"
_KEY_BYTES, _NONCE_BYTES = 32, 12


class PayloadKeyError(MachineError):
    """This process lacks the key of a payload, or has another key under its id. The message names the remedy."""


class EncryptionCodec(PayloadCodec):
    """AES-256-GCM: a random nonce, then the encrypted payload; the key's id is authenticated and in the metadata.

    `is_refused` is set from the first payload that cannot be decrypted until it can be, or is given up.
    """

    def __init__(self, path: Path | None) -> None:
        """Read the keys; None: encrypt nothing. Raises ConfigError."""
        self._path = path
        self._keys = _read_keys(path) if path is not None else {}
        self.newest = next(reversed(self._keys), None)
        self.is_refused = asyncio.Event()
        self._refused: Payload | None = None

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [self._encrypt(payload) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Decrypt those that are encrypted. Raises PayloadKeyError."""
        return [self._decrypt(payload) if _is_encrypted(payload) else payload for payload in payloads]

    async def retry_refused(self) -> None:
        """Raise PayloadKeyError if the payload that was refused last still cannot be decrypted."""
        if self._refused is not None:
            await self.decode([self._refused])
        self.forget_refused()

    def forget_refused(self) -> None:
        """Give up the payload that was refused last, so that only its own workflow waits for its key."""
        self._refused = None
        self.is_refused.clear()

    def has_newest_key(self, payload: Payload) -> bool:
        """Return whether a payload is encrypted with the key that encrypts now, or with none if none does."""
        return (_key_id(payload) if _is_encrypted(payload) else None) == self.newest

    def _encrypt(self, payload: Payload) -> Payload:
        if self.newest is None:
            return payload
        nonce, key_id = os.urandom(_NONCE_BYTES), self.newest.encode()
        data = self._keys[self.newest].encrypt(nonce, payload.SerializeToString(), key_id)
        return Payload(metadata={_ENCODING: _ENCRYPTED, _KEY_ID: key_id}, data=nonce + data)

    def _decrypt(self, payload: Payload) -> Payload:
        try:
            return self._open(payload)
        except (KeyError, InvalidTag):
            pass
        remedy = f"add it as a line `{_key_id(payload)}:KEY` to {self._path or f'a file that {KEY_FILE_SETTING} names'}"
        try:
            if self._path is not None:
                self._keys |= _read_keys(self._path)  # a key may have been added since the start
            return self._open(payload)
        except KeyError:
            reason = f"the key {_key_id(payload)!r} of a payload in Temporal is not known to this process; {remedy}"
        except InvalidTag:
            reason = (
                f"the key {_key_id(payload)!r} in {self._path} is not the one with which a payload in Temporal was "
                "encrypted; write the same key into the file of every host"
            )
        except ConfigError as error:
            reason = f"a payload in Temporal cannot be decrypted: {error}"
        self._refused = payload
        self.is_refused.set()
        raise PayloadKeyError(reason)

    def _open(self, payload: Payload) -> Payload:
        """Decrypt with the keys that are known. Raises KeyError and InvalidTag."""
        nonce, data = payload.data[:_NONCE_BYTES], payload.data[_NONCE_BYTES:]
        key_id = _key_id(payload)
        return Payload.FromString(self._keys[key_id].decrypt(nonce, data, key_id.encode()))


def _is_encrypted(payload: Payload) -> bool:
    return payload.metadata.get(_ENCODING) == _ENCRYPTED


def _key_id(payload: Payload) -> str:
    return payload.metadata.get(_KEY_ID, b"").decode(errors="replace")


def _read_keys(path: Path) -> dict[str, AESGCM]:
    """Return id → key in the order of the lines. Raises ConfigError, whose message contains no key."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{KEY_FILE_SETTING}: {path} cannot be read ({error}); it needs one line ID:KEY per key"
        ) from None
    found: dict[str, AESGCM] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        key_id, _, text = line.strip().partition(":")
        try:
            key = base64.b64decode(text, validate=True)
        except binascii.Error:
            key = b""
        if not key_id or len(key) != _KEY_BYTES or key_id in found:
            raise ConfigError(
                f"{KEY_FILE_SETTING}: {path}, line {number}: expected ID:KEY with an id that no other line has and "
                f"{_KEY_BYTES} bytes in base64, such as the output of `openssl rand -base64 {_KEY_BYTES}`"
            )
        found[key_id] = AESGCM(key)
    if not found:
        raise ConfigError(f"{KEY_FILE_SETTING}: {path} has no key; add a line ID:KEY")
    return found


def encryption_codec() -> EncryptionCodec:
    """Return the codec with the keys that the environment names. Raises ConfigError."""
    path = os.environ.get(KEY_FILE_SETTING)
    return EncryptionCodec(Path(path).expanduser().resolve() if path else None)


class StorablePayloadConverter(PydanticPayloadConverter):
    """Pydantic's JSON; lone surrogates, which JSON in UTF-8 cannot hold, are written as escapes."""

    def to_payloads(self, values: Sequence[Any]) -> list[Payload]:
        try:
            return super().to_payloads(values)
        except PydanticSerializationError:
            plain = [one.model_dump() if isinstance(one, BaseModel) else one for one in values]
            return super().to_payloads([storable_parts(one) for one in plain])


def payload_converter() -> DataConverter:
    """Return the converter of every client and worker. Raises ConfigError for a key file that cannot be used.

    With keys, messages and stack traces of failures are encrypted, too.
    """
    codec = encryption_codec()
    converter = DataConverter(payload_converter_class=StorablePayloadConverter, payload_codec=codec)
    if codec.newest is None:
        return converter
    return dataclasses.replace(converter, failure_converter_class=DefaultFailureConverterWithEncodedAttributes)


def codec_of(converter: DataConverter) -> EncryptionCodec:
    """Return the codec of a converter that `payload_converter` has made."""
    assert isinstance(converter.payload_codec, EncryptionCodec)
    return converter.payload_codec
