"""The copies of versions on a node: complete or not there, fetched once, never deleted while in use."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from engine import policy_cache, weight_deltas
from engine.policy_cache import KEPT_VERSIONS, UNUSED_SECONDS, PolicyCache
from engine.policy_files import describe_files, is_intact
from engine.weight_deltas import LocalVersion
from engine.weight_storage import RANGE_BYTES, DamagedVersionError, upload_version
from ratchet.errors import WeightStorageError
from ratchet.types import JsonObject

WEIGHTS = "model.safetensors"
DELTA = f"{WEIGHTS}{weight_deltas.SUFFIX}"
_processes = multiprocessing.get_context("forkserver")


class Storage:
    """Versions of one run in a directory that is addressed by fsspec."""

    def __init__(self, home: Path, run_id: str = "run-1") -> None:
        self.home = home
        self.run_id = run_id
        self.files: dict[str, list[JsonObject]] = {}

    def uri(self, name: str) -> str:
        return f"file://{self.home}/stored/{self.run_id}/{name}"

    def stored(self, name: str) -> Path:
        return self.home / "stored" / self.run_id / name

    def learner(self, name: str) -> Path:
        return self.home / "learner" / self.run_id / name

    def store(self, name: str, num_bytes: int = 1000) -> None:
        source = self.learner(name)
        source.mkdir(parents=True)
        (source / WEIGHTS).write_bytes(bytes(8) + name.encode() + os.urandom(num_bytes))
        (source / "config.json").write_text("{}")
        self.files[name] = describe_files(source)
        upload_version(source, self.uri(name), self.files[name])

    def store_chain(self, length: int) -> None:
        """Store versions 0.e1, 1.e1 and so on, the first one whole, of the others what changed."""
        self.store("0.e1")
        for step in range(1, length):
            name, before = f"{step}.e1", f"{step - 1}.e1"
            shutil.copytree(self.learner(before), self.learner(name))
            weights = bytearray((self.learner(name) / WEIGHTS).read_bytes())
            weights[-step] ^= 255
            (self.learner(name) / WEIGHTS).write_bytes(weights)
            earlier = LocalVersion(f"run-1/{before}", self.learner(before), self.files[before])
            written = LocalVersion(f"run-1/{name}", self.learner(name), describe_files(self.learner(name)))
            deltas = self.home / "deltas" / name
            self.files[name] = weight_deltas.with_deltas(written, earlier, deltas, max_links=length)
            version = LocalVersion(written.version, written.directory, self.files[name])
            weight_deltas.upload(version, deltas, self.uri(name), set())

    def fetch(self, cache: PolicyCache, name: str) -> Path:
        return cache.fetch(self.uri(name), self.files[name])


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "policies"


def test_a_version_is_fetched_to_the_place_of_the_learners_own(storage: Storage, root: Path) -> None:
    storage.store("1.e1", num_bytes=2 * RANGE_BYTES + 5)
    with PolicyCache(root) as cache:
        directory = storage.fetch(cache, "1.e1")
    assert directory == root / "run-1" / "1.e1" and is_intact(directory, storage.files["1.e1"])
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", WEIGHTS]


def test_versions_on_a_shared_path_and_the_learners_own_are_neither_copied_nor_deleted(
    storage: Storage, root: Path
) -> None:
    storage.store("0.e0")
    own = root / "run-1" / "0.e0"
    own.mkdir(parents=True)
    with PolicyCache(root) as cache:
        assert cache.fetch("/shared/run-1/7.e1", []) == Path("/shared/run-1/7.e1")
        assert storage.fetch(cache, "0.e0") == own
        cache.discard(own)
    assert list(own.iterdir()) == [] and not own.with_name("0.e0.lock").exists()


def test_a_fetch_goes_on_where_an_earlier_one_has_stopped(storage: Storage, root: Path) -> None:
    storage.store("1.e1", num_bytes=RANGE_BYTES)
    weights = (storage.stored("1.e1") / WEIGHTS).read_bytes()
    building = root / "run-1" / "1.e1.fetching"
    building.mkdir(parents=True)
    (building / f"{WEIGHTS}.part").write_bytes(weights[:1000])
    # What is there already is not read again: its beginning may now be damaged at the address.
    (storage.stored("1.e1") / WEIGHTS).write_bytes(bytes(1000) + weights[1000:])
    with PolicyCache(root) as cache:
        assert (storage.fetch(cache, "1.e1") / WEIGHTS).read_bytes() == weights
    assert not building.exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lambda weights: weights[:-1], "bytes, expected"), (lambda weights: b"x" + weights[1:], "has sha256")],
)
def test_a_damaged_file_is_refused_and_fetched_again(
    storage: Storage, root: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    storage.store("1.e1")
    stored = storage.stored("1.e1") / WEIGHTS
    weights = stored.read_bytes()
    stored.write_bytes(damage(weights))
    with PolicyCache(root) as cache:
        with pytest.raises(DamagedVersionError, match=message):
            storage.fetch(cache, "1.e1")
        assert not (root / "run-1" / "1.e1").exists()
        stored.write_bytes(weights)
        assert is_intact(storage.fetch(cache, "1.e1"), storage.files["1.e1"])


def test_a_file_that_is_not_there_is_waited_for(storage: Storage, root: Path) -> None:
    storage.store("1.e1")
    (storage.stored("1.e1") / WEIGHTS).unlink()
    with PolicyCache(root) as cache, pytest.raises(WeightStorageError, match="FileNotFoundError") as raised:
        storage.fetch(cache, "1.e1")
    assert not isinstance(raised.value, DamagedVersionError)


def test_several_fetches_at_once_copy_once(storage: Storage, root: Path) -> None:
    """Each thread has a cache of its own, as each engine of a node has. A second copy could not get the name."""
    storage.store("1.e1", num_bytes=RANGE_BYTES)
    caches = [PolicyCache(root) for _ in range(6)]
    with ThreadPoolExecutor(len(caches)) as pool:
        directories = list(pool.map(lambda cache: storage.fetch(cache, "1.e1"), caches))
    assert len(set(directories)) == 1 and is_intact(directories[0], storage.files["1.e1"])
    assert sorted(path.name for path in (root / "run-1").iterdir()) == ["1.e1", "1.e1.lock"]
    for cache in caches:
        cache.__exit__()


def test_a_fetch_does_not_wait_for_a_process_that_uses_the_version(
    storage: Storage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen that the version is missing when the other process copies it, which then holds it for long."""
    storage.store("1.e1")
    is_missing, is_copied = threading.Event(), threading.Event()
    locked_alone = policy_cache._locked_alone
    late = threading.Thread(target=lambda: found.append(storage.fetch(second, "1.e1")))
    found: list[Path] = []

    def wait(lock: Path) -> int | None:
        if threading.current_thread() is late:
            is_missing.set()
            assert is_copied.wait(60)
        return locked_alone(lock)

    monkeypatch.setattr(policy_cache, "_locked_alone", wait)
    with PolicyCache(root) as first, PolicyCache(root) as second:
        late.start()
        assert is_missing.wait(60)
        there = storage.fetch(first, "1.e1")
        is_copied.set()
        late.join(60)
        assert found == [there]


def test_the_versions_that_were_used_last_stay(storage: Storage, root: Path) -> None:
    names = [f"{step}.e1" for step in range(KEPT_VERSIONS + 2)]
    for name in names:
        storage.store(name)
        with PolicyCache(root) as cache:
            storage.fetch(cache, names[0])  # the base of adapters, for example
            storage.fetch(cache, name)
        _next_time(root)
    there = {path.name for path in (root / "run-1").iterdir() if path.is_dir()}
    assert there == {names[0], *names[-(KEPT_VERSIONS - 1) :]}


def test_a_version_in_use_stays(storage: Storage, root: Path) -> None:
    names = [f"{step}.e1" for step in range(2 * KEPT_VERSIONS)]
    for name in names:
        storage.store(name)
    with PolicyCache(root) as user:
        first = storage.fetch(user, names[0])
        for name in names[1:]:
            _next_time(root)
            with PolicyCache(root) as other:
                storage.fetch(other, name)
        user.discard(root / "run-1" / names[-1])  # it does not use that one
        assert is_intact(first, storage.files[names[0]])
        # Its own newer versions take the place of those that it has used before them.
        for name in names[-KEPT_VERSIONS:]:
            _next_time(root)
            storage.fetch(user, name)
        assert not first.exists() and len(list((root / "run-1").glob("*.lock"))) == KEPT_VERSIONS


def test_versions_of_a_run_stay_beside_those_of_another_until_they_are_unused_for_long(
    storage: Storage, root: Path, tmp_path: Path
) -> None:
    """The engines of two runs are on one machine, and one of them is restarted."""
    other = Storage(tmp_path, "run-2")
    names = [f"{step}.e1" for step in range(KEPT_VERSIONS)]
    for one in (storage, other):
        for name in names:
            one.store(name)
    other.store("9.e1")
    for name in names:
        with PolicyCache(root) as cache:
            storage.fetch(cache, name)
    with PolicyCache(root) as cache:
        for name in names:
            _next_time(root)
            other.fetch(cache, name)
        assert {path.name for path in (root / "run-1").iterdir() if path.is_dir()} == set(names)
        with PolicyCache(root) as user:
            storage.fetch(user, names[0])
            _next_time(root, UNUSED_SECONDS)
            other.fetch(cache, "9.e1")
            assert [path.name for path in (root / "run-1").iterdir() if path.is_dir()] == names[:1], "which is in use"
        other.fetch(cache, "9.e1")
        assert (root / "run-1" / names[0]).exists(), "although its process has ended, an hour after it was fetched"
        there = {path.name for path in (root / "run-2").iterdir() if path.is_dir()}
        assert there == {*names[1:], "9.e1"}, "of a run that was used now, although not lately"


def test_a_version_is_made_of_a_whole_one_and_deltas(storage: Storage, root: Path) -> None:
    storage.store_chain(4)
    with PolicyCache(root) as cache:
        directory = storage.fetch(cache, "3.e1")
    assert is_intact(directory, storage.files["3.e1"])
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", WEIGHTS]
    assert [path.name for path in storage.stored("3.e1").iterdir()] == [DELTA]


@pytest.mark.parametrize("is_learners", [False, True])
def test_beside_the_version_before_its_delta_is_enough(storage: Storage, root: Path, is_learners: bool) -> None:
    storage.store_chain(4)
    with PolicyCache(root) as cache:
        if is_learners:
            shutil.copytree(storage.learner("2.e1"), root / "run-1" / "2.e1")
        else:
            storage.fetch(cache, "2.e1")
        for name in ("0.e1", "1.e1", "2.e1"):
            shutil.rmtree(storage.stored(name))
        assert is_intact(storage.fetch(cache, "3.e1"), storage.files["3.e1"])


@pytest.mark.parametrize("num_bytes", [-1, 0, 1])
def test_a_version_before_that_has_changed_on_the_disk_is_not_used(
    storage: Storage, root: Path, num_bytes: int
) -> None:
    storage.store_chain(3)
    with PolicyCache(root) as cache:
        here = storage.fetch(cache, "1.e1") / WEIGHTS
        here.write_bytes(bytes(here.stat().st_size + num_bytes))
        assert is_intact(storage.fetch(cache, "2.e1"), storage.files["2.e1"])


def test_a_fetch_of_deltas_goes_on_where_an_earlier_one_has_stopped(storage: Storage, root: Path) -> None:
    """One delta is here and checked, another in part, and the file that they make is half written."""
    storage.store_chain(3)
    checked, partial = (storage.stored(name) / DELTA for name in ("1.e1", "2.e1"))
    building = root / "run-1" / "2.e1.fetching"
    building.mkdir(parents=True)
    (building / f"{WEIGHTS}.1").write_bytes(checked.read_bytes())
    (building / f"{WEIGHTS}.2.part").write_bytes(partial.read_bytes()[:10])
    (building / f"{WEIGHTS}.made").write_bytes(b"half")
    # What is there already is not read again: it may now be gone or damaged at the address.
    checked.unlink()
    partial.write_bytes(bytes(10) + partial.read_bytes()[10:])
    with PolicyCache(root) as cache:
        directory = storage.fetch(cache, "2.e1")
    assert is_intact(directory, storage.files["2.e1"]) and not building.exists()
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", WEIGHTS]


def _stop_before_the_file_is_made(root: Path, uri: str, files: list[JsonObject], stops: Event) -> None:
    apply_deltas = weight_deltas.apply_deltas

    def stop(whole: Path, deltas: Sequence[Path], file: Path) -> str:
        if deltas:
            stops.set()
            time.sleep(600)
        return apply_deltas(whole, deltas, file)

    weight_deltas.apply_deltas = stop
    PolicyCache(root).fetch(uri, files)


def test_what_a_killed_process_has_fetched_of_a_chain_is_not_fetched_again(storage: Storage, root: Path) -> None:
    storage.store_chain(3)
    stops, fetch = _processes.Event(), (root, storage.uri("2.e1"), storage.files["2.e1"])
    process = _processes.Process(target=_stop_before_the_file_is_made, args=(*fetch, stops))
    process.start()
    assert stops.wait(60)
    process.kill()
    process.join()
    for name in ("0.e1", "1.e1", "2.e1"):
        for path in storage.stored(name).glob(f"{WEIGHTS}*"):
            path.unlink()
    with PolicyCache(root) as cache:
        assert is_intact(storage.fetch(cache, "2.e1"), storage.files["2.e1"])


def test_what_has_changed_on_the_disk_since_it_was_checked_is_fetched_again(storage: Storage, root: Path) -> None:
    storage.store_chain(2)
    building = root / "run-1" / "1.e1.fetching"
    building.mkdir(parents=True)
    (building / f"{WEIGHTS}.whole").write_bytes(bytes((storage.stored("0.e1") / WEIGHTS).stat().st_size))
    with PolicyCache(root) as cache:
        with pytest.raises(DamagedVersionError, match="the deltas make a file of sha256"):
            storage.fetch(cache, "1.e1")
        assert is_intact(storage.fetch(cache, "1.e1"), storage.files["1.e1"])


@pytest.mark.parametrize("damaged", ["0.e1", "1.e1", "2.e1"])
def test_a_damaged_link_is_refused_until_it_is_whole_or_a_version_does_without(
    storage: Storage, root: Path, damaged: str
) -> None:
    storage.store_chain(3)
    stored = storage.stored(damaged) / (WEIGHTS if damaged == "0.e1" else DELTA)
    content = stored.read_bytes()
    stored.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    storage.store("3.e1")
    with PolicyCache(root) as cache:
        with pytest.raises(DamagedVersionError, match=f"{stored} has sha256"):
            storage.fetch(cache, "2.e1")
        assert not (root / "run-1" / "2.e1").exists()
        assert is_intact(storage.fetch(cache, "3.e1"), storage.files["3.e1"]), "which is whole"
        stored.write_bytes(content)
        assert is_intact(storage.fetch(cache, "2.e1"), storage.files["2.e1"])


def test_a_link_that_is_gone_is_waited_for(storage: Storage, root: Path) -> None:
    storage.store_chain(3)
    shutil.rmtree(storage.stored("1.e1"))
    with PolicyCache(root) as cache, pytest.raises(WeightStorageError, match="FileNotFoundError") as raised:
        storage.fetch(cache, "2.e1")
    assert not isinstance(raised.value, DamagedVersionError)


def _next_time(root: Path, seconds: float = 10) -> None:
    """Let what follows be used later than everything so far: times of files are as coarse as the kernel's clock."""
    for lock in root.glob("*/*.lock"):
        used = lock.stat()
        os.utime(lock, (used.st_atime - seconds, used.st_mtime - seconds))


def _hold(root: Path, uri: str, files: list[JsonObject], holds: Event) -> None:
    PolicyCache(root).fetch(uri, files)
    holds.set()
    time.sleep(600)


def test_what_a_killed_process_used_is_free(storage: Storage, root: Path) -> None:
    storage.store("0.e0")
    holds = _processes.Event()
    process = _processes.Process(target=_hold, args=(root, storage.uri("0.e0"), storage.files["0.e0"], holds))
    process.start()
    assert holds.wait(60)
    with PolicyCache(root) as cache:
        cache.discard(root / "run-1" / "0.e0")
        assert (root / "run-1" / "0.e0").exists()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        cache.discard(root / "run-1" / "0.e0")
        assert list((root / "run-1").iterdir()) == []
