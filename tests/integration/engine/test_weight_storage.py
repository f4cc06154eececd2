"""Weights at an S3 server: they come back as they were, also if the connection is cut in the middle of a file."""

import os
import uuid
from pathlib import Path

import pytest

from engine import weight_storage
from engine.policy_cache import PolicyCache
from engine.policy_files import describe_files, is_intact
from engine.weight_deltas import LocalVersion, upload, with_deltas
from engine.weight_storage import RANGE_BYTES, RANGES_AT_ONCE, DamagedVersionError
from ratchet.errors import WeightStorageError
from ratchet.types import JsonObject
from tests.s3_storage import S3Storage

WEIGHTS = "model.safetensors"


class Version:
    """A version at a bucket of its own."""

    def __init__(self, s3: S3Storage, home: Path, num_bytes: int = 5000) -> None:
        self.source = home / "learner"
        self.source.mkdir()
        (self.source / WEIGHTS).write_bytes(bytes(8) + os.urandom(num_bytes - 8))
        (self.source / "config.json").write_text("{}")
        self.files: list[JsonObject] = describe_files(self.source)
        self.address = f"{s3.make_bucket(f'weights-{uuid.uuid4().hex[:8]}')}/runs"
        self.uri = weight_storage.version_address(self.address, "run-1/1.e1")

    def upload(self) -> None:
        weight_storage.upload_version(self.source, self.uri, self.files)


@pytest.fixture
def version(s3: S3Storage, tmp_path: Path) -> Version:
    return Version(s3, tmp_path)


def test_a_version_is_uploaded_fetched_and_deleted(version: Version, tmp_path: Path) -> None:
    version.upload()
    assert weight_storage.list_versions(version.address, "run-1") == ["1.e1"]
    with PolicyCache(tmp_path / "policies") as cache:
        assert is_intact(cache.fetch(version.uri, version.files), version.files)
    weight_storage.delete_version(version.uri)
    assert weight_storage.list_versions(version.address, "run-1") == []


def test_a_fetch_that_was_cut_goes_on_when_the_server_is_back(s3: S3Storage, tmp_path: Path) -> None:
    """The file has one range more than are read at once, and the link is cut in the middle of that one."""
    first = RANGES_AT_ONCE * RANGE_BYTES
    version = Version(s3, tmp_path, first + RANGE_BYTES)
    version.upload()
    with PolicyCache(tmp_path / "policies") as cache:
        s3.link.cut(after_bytes=first + RANGE_BYTES // 2)
        try:
            with pytest.raises(WeightStorageError, match=f"^{version.uri}/{WEIGHTS}: "):
                cache.fetch(version.uri, version.files)
        finally:
            s3.link.mend()
        part = tmp_path / "policies" / "run-1" / "1.e1.fetching" / f"{WEIGHTS}.part"
        assert part.stat().st_size == first
        before = s3.link.num_bytes
        assert is_intact(cache.fetch(version.uri, version.files), version.files)
    assert s3.link.num_bytes - before < 2 * RANGE_BYTES, "what is here is not read again"


def test_beside_the_version_before_only_a_delta_is_read(s3: S3Storage, tmp_path: Path) -> None:
    """The link is cut in the middle of the delta, which a second try then reads."""
    version = Version(s3, tmp_path, 4_000_000)
    version.upload()
    after, deltas = tmp_path / "after", tmp_path / "deltas"
    after.mkdir()
    weights = (version.source / WEIGHTS).read_bytes()
    changes = os.urandom(len(weights) // 4)
    (after / WEIGHTS).write_bytes(weights[: -len(changes)] + changes)
    (after / "config.json").write_text("{}")
    before = LocalVersion("run-1/1.e1", version.source, version.files)
    files = with_deltas(LocalVersion("run-1/2.e1", after, describe_files(after)), before, deltas, max_links=2)
    uri = weight_storage.version_address(version.address, "run-1/2.e1")
    upload(LocalVersion("run-1/2.e1", after, files), deltas, uri, set())
    with PolicyCache(tmp_path / "policies") as cache:
        cache.fetch(version.uri, version.files)
        weight_storage.delete_version(version.uri)
        s3.link.cut(after_bytes=len(changes) // 2)
        try:
            with pytest.raises(WeightStorageError, match=f"^{uri}/{WEIGHTS}.delta: "):
                cache.fetch(uri, files)
        finally:
            s3.link.mend()
        assert is_intact(cache.fetch(uri, files), files)


def test_an_upload_without_a_server_is_repeated(s3: S3Storage, version: Version) -> None:
    s3.link.cut()
    try:
        with pytest.raises(WeightStorageError, match=f"^{version.uri}: ") as raised:
            version.upload()
    finally:
        s3.link.mend()
    assert "test-secret" not in str(raised.value)
    version.upload()
    assert weight_storage.list_versions(version.address, "run-1") == ["1.e1"]


def test_a_damaged_object_is_refused_until_it_is_whole(version: Version, tmp_path: Path) -> None:
    version.upload()
    whole = (version.source / WEIGHTS).read_bytes()
    with PolicyCache(tmp_path / "policies") as cache:
        for damaged, message in ((whole[:-1], "bytes, expected"), (whole[:-1] + b"x", "sha256")):
            (version.source / WEIGHTS).write_bytes(damaged)
            version.upload()
            with pytest.raises(DamagedVersionError, match=message):
                cache.fetch(version.uri, version.files)
        (version.source / WEIGHTS).write_bytes(whole)
        version.upload()
        assert is_intact(cache.fetch(version.uri, version.files), version.files)


def test_a_bucket_that_does_not_exist_is_waited_for(s3: S3Storage, tmp_path: Path) -> None:
    uri = "s3://no-such-bucket/run-1/1.e1"
    with PolicyCache(tmp_path) as cache, pytest.raises(WeightStorageError, match="FileNotFoundError"):
        cache.fetch(uri, [{"name": WEIGHTS, "sha256": "00", "bytes": 1}])
