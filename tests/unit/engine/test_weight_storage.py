"""Addresses of weights: what is refused before a run, and that files come back as they were."""

from pathlib import Path

import pytest

from engine import weight_storage
from engine.policy_files import describe_files
from ratchet.errors import ConfigError, WeightStorageError


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("/shared/weights", "expected an address with a scheme"),
        ("s3://", "expected an address with a scheme"),
        ("s4://bucket/weights", "unknown scheme 's4'"),
        ("s3://key:secret@bucket/weights", "give credentials in the environment"),
        ("oci://bucket/weights", "oci:// needs a package that is not installed .*ocifs"),
    ],
)
def test_a_wrong_address_is_refused_with_a_remedy(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^training.weights_address: .*{message}") as raised:
        weight_storage.check_address("training.weights_address", address)
    assert "secret" not in str(raised.value)


def test_known_schemes_are_accepted() -> None:
    for address in ("s3://bucket/weights", "file:///mnt/weights"):
        weight_storage.check_address("training.weights_address", address)


def test_versions_are_stored_listed_read_and_deleted(tmp_path: Path) -> None:
    source, address = tmp_path / "3.e1", f"file://{tmp_path}/stored/"
    source.mkdir()
    (source / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (source / "config.json").write_text("{}")
    uri = weight_storage.version_address(address, "run-1/3.e1")
    assert uri == f"file://{tmp_path}/stored/run-1/3.e1"
    assert weight_storage.list_versions(address, "run-1") == []
    for _ in range(2):  # a learner that begins again stores the same version once more
        weight_storage.upload_version(source, uri, describe_files(source))
    assert weight_storage.list_versions(address, "run-1") == ["3.e1"]
    read = weight_storage.read_file(f"{uri}/model.safetensors", 1000, 25600)
    assert b"".join(read) == (source / "model.safetensors").read_bytes()[1000:]
    for _ in range(2):
        weight_storage.delete_version(uri)
    assert weight_storage.list_versions(address, "run-1") == []


def test_what_an_earlier_try_has_stored_is_left_out(tmp_path: Path) -> None:
    source, uri = tmp_path / "3.e1", f"file://{tmp_path}/stored/run-1/3.e1"
    source.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (source / name).write_bytes(name.encode())
    files = describe_files(source)
    (source / "b.safetensors").rename(source / "away")
    stored: set[str] = set()
    with pytest.raises(WeightStorageError):
        weight_storage.upload_version(source, uri, files, stored)
    assert stored == {"a.safetensors"}
    (source / "away").rename(source / "b.safetensors")
    (source / "a.safetensors").unlink()
    weight_storage.upload_version(source, uri, files, stored)
    assert sorted(path.name for path in (tmp_path / "stored" / "run-1" / "3.e1").iterdir()) == sorted(stored)
