import base64
from pathlib import Path

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError

from ratchet.errors import ConfigError, MachineError
from ratchet.payload_codec import KEY_FILE_SETTING, EncryptionCodec, PayloadKeyError, codec_of, payload_converter
from ratchet.payloads import PauseRunInput

TASK = "mend the parser"


def line(key_id: str, byte: int) -> str:
    return f"{key_id}:{base64.b64encode(bytes([byte]) * 32).decode()}\n"


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "payload_keys"
    path.write_text("# one key a line\n" + line("first", 1))
    monkeypatch.setenv(KEY_FILE_SETTING, str(path))
    return path


async def encrypted(converter: DataConverter, value: object = TASK) -> Payload:
    return (await converter.encode([value]))[0]


async def test_only_the_key_id_can_be_read(key_file: Path) -> None:
    payload = await encrypted(payload_converter())
    assert TASK.encode() not in payload.SerializeToString()
    assert payload.metadata["encryption-key-id"] == b"first"
    assert await payload_converter().decode([payload], [str]) == [TASK]
    assert await encrypted(payload_converter()) != payload, "each payload has a nonce of its own"


async def test_the_newest_key_encrypts_and_every_key_decrypts(key_file: Path) -> None:
    before = payload_converter()
    old = await encrypted(before)
    key_file.write_text(key_file.read_text() + line("second", 2))
    after = payload_converter()
    new = await encrypted(after)
    assert new.metadata["encryption-key-id"] == b"second"
    assert await after.decode([old, new], [str, str]) == [TASK, TASK]
    assert not codec_of(after).has_newest_key(old) and codec_of(after).has_newest_key(new)
    # A process that began before the key was added reads the file again.
    assert await before.decode([new], [str]) == [TASK]


async def test_what_was_not_encrypted_passes(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_FILE_SETTING)
    plain = await encrypted(payload_converter())
    assert TASK.encode() in plain.data
    monkeypatch.setenv(KEY_FILE_SETTING, str(key_file))
    assert await payload_converter().decode([plain], [str]) == [TASK]


async def test_a_key_that_is_missing_is_named_until_it_is_there(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = await encrypted(payload_converter())
    other = tmp_path / "other_keys"
    other.write_text(line("second", 2))
    monkeypatch.setenv(KEY_FILE_SETTING, str(other))
    codec = codec_of(payload_converter())
    with pytest.raises(MachineError, match=f"'first'.*add it as a line `first:KEY` to {other}"):
        await codec.decode([payload])
    assert codec.is_refused.is_set()
    with pytest.raises(PayloadKeyError):
        await codec.retry_refused()
    other.write_text(key_file.read_text() + other.read_text())
    await codec.retry_refused()
    assert not codec.is_refused.is_set()


async def test_without_a_file_the_setting_is_named(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = await encrypted(payload_converter())
    monkeypatch.delenv(KEY_FILE_SETTING)
    with pytest.raises(PayloadKeyError, match=f"a file that {KEY_FILE_SETTING} names"):
        await payload_converter().decode([payload])


@pytest.mark.parametrize("change", ["key", "data", "id"])
async def test_another_key_or_a_changed_payload_is_refused(key_file: Path, change: str) -> None:
    payload = await encrypted(payload_converter())
    if change == "data":
        payload.data = payload.data[:-1] + bytes([payload.data[-1] ^ 1])
    key_file.write_text(line("first", 9 if change == "key" else 1) + line("second", 1))
    if change == "id":  # the same key under another id
        payload.metadata["encryption-key-id"] = b"second"
    with pytest.raises(PayloadKeyError, match=r"is not the one.*same key into the file of every host"):
        await payload_converter().decode([payload])


async def test_messages_of_failures_are_encrypted(key_file: Path) -> None:
    failure = Failure()
    await payload_converter().encode_failure(ApplicationError(TASK, TASK), failure)
    assert TASK not in str(failure)
    error = await payload_converter().decode_failure(failure)
    assert isinstance(error, ApplicationError) and (error.message, error.details) == (TASK, (TASK,))


@pytest.mark.parametrize(
    "text", ["", "first:abc\n", "first\n", ":" + line("", 1)[1:], line("first", 1) * 2, "first:" + "A" * 40 + "\n"]
)
def test_a_file_that_cannot_be_used_is_refused_without_its_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "payload_keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)) as refused:
        EncryptionCodec(path)
    secret = text.partition(":")[2].strip()
    assert not secret or secret not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/none cannot be read"):
        EncryptionCodec(tmp_path / "none")


async def test_a_text_that_quotes_bytes_can_be_sent() -> None:
    """JSON in UTF-8 has no lone surrogates, so a reason that contains one would not be sent."""
    sent = PauseRunInput(run_id="r", reason="caf\udce9 \0")
    payloads = await payload_converter().encode([sent, {"a\udce9": [1, "\udce9"]}, "caf\udce9"])
    received = await payload_converter().decode(payloads, [PauseRunInput, dict, str])
    assert received == [
        PauseRunInput(run_id="r", reason="caf\\udce9 \\0"), {"a\\udce9": [1, "\\udce9"]}, "caf\\udce9"
    ]  # fmt: skip
    payloads = await payload_converter().encode([PauseRunInput(run_id="r", reason="café \0")])
    assert (await payload_converter().decode(payloads, [PauseRunInput]))[0].reason == "café \0"
