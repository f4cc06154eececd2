"""Deltas of weight files: what is stored as one, and that files come back bit by bit."""

import hashlib
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import adapter_files, weight_deltas
from engine.policy_files import describe_files, file_sha256
from engine.weight_deltas import LocalVersion, apply_deltas, with_deltas, write_delta
from ratchet.types import JsonObject

WEIGHTS = "model.safetensors"
NUM_BYTES = 40_000


def safetensors(data: bytes, name: str = "weight") -> bytes:
    tensor = {"dtype": "BF16", "shape": [len(data) // 2], "data_offsets": [0, len(data)]}
    header = json.dumps({name: tensor}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def changed(data: bytes, share: float, seed: int) -> bytes:
    """Change this share of the bytes, each to any value."""
    generator = np.random.default_rng(seed)
    flips = generator.integers(0, 256, len(data), np.uint8) * (generator.random(len(data)) < share)
    return (np.frombuffer(data, np.uint8) ^ flips.astype(np.uint8)).tobytes()


class Versions:
    """Versions of one run, each with the deltas to the one before it."""

    def __init__(self, home: Path, max_links: int = 100) -> None:
        self.home = home
        self.max_links = max_links
        self.newest: LocalVersion | None = None

    def add(self, step: int, **contents: bytes) -> dict[str, JsonObject]:
        """Write the files of a step; `model` is model.safetensors, others are JSON. Return the row's files by name."""
        version = f"run-1/{step}.e1"
        directory = self.home / version
        directory.mkdir(parents=True)
        for name, content in contents.items():
            (directory / (f"{name}.safetensors" if "model" in name else f"{name}.json")).write_bytes(content)
        added = LocalVersion(version, directory, describe_files(directory))
        if self.newest is not None:
            files = with_deltas(added, self.newest, self.deltas(step), self.max_links)
            added = LocalVersion(version, directory, files)
        self.newest = added
        return {file["name"]: file for file in added.files}

    def deltas(self, step: int) -> Path:
        return self.home / "deltas" / str(step)


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(0, 1500),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.05, 1.0]), min_size=1, max_size=4),
    piece_bytes=st.sampled_from([2, 14, 64, 1024, 1 << 20]),
    seed=st.integers(0, 2**32),
)
def test_a_file_is_its_whole_predecessor_and_all_deltas(
    size: int, shares: list[float], piece_bytes: int, seed: int
) -> None:
    data = random.Random(seed).randbytes(size)
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_deltas, "PIECE_BYTES", piece_bytes)
        patch.setattr(weight_deltas, "MAX_SHARE", float("inf"))
        first = before = Path(home, "0")
        first.write_bytes(safetensors(data))
        deltas = []
        for number, share in enumerate(shares, 1):
            data = changed(data, share, seed + number)
            after, delta = Path(home, str(number)), Path(home, f"{number}.delta")
            after.write_bytes(safetensors(data))
            assert write_delta(before, file_sha256(before), after, delta)
            deltas.append(delta)
            before = after
        random.Random(seed).shuffle(deltas)
        assert apply_deltas(first, deltas, Path(home, "made")) == hashlib.sha256(safetensors(data)).hexdigest()
        assert Path(home, "made").read_bytes() == safetensors(data)


def test_few_changes_make_a_small_delta(versions: Versions) -> None:
    """One number of a hundred changes by one in its last place, as after a step of RL on bfloat16 weights."""
    generator = np.random.default_rng(0)
    numbers = generator.integers(0, 1 << 16, 200_000, np.uint16)
    after = numbers ^ (generator.random(len(numbers)) < 0.01)
    versions.add(1, model=safetensors(numbers.tobytes()))
    link = versions.add(2, model=safetensors(after.astype(np.uint16).tobytes()))[WEIGHTS]["chain"][-1]
    assert link["bytes"] < 0.02 * after.astype(np.uint16).nbytes
    delta = versions.deltas(2) / (WEIGHTS + weight_deltas.SUFFIX)
    assert (link["sha256"], link["bytes"]) == (file_sha256(delta), delta.stat().st_size)


def test_a_chain_names_all_that_its_file_is_made_of_and_ends_before_it_is_too_long(versions: Versions) -> None:
    versions.max_links = 3
    data, stored = random.Random(0).randbytes(NUM_BYTES), []
    for step in range(8):
        data = changed(data, 0.01, step)
        stored.append(versions.add(step, model=safetensors(data), config=b"{}"))
    chains = [[link["version"].rpartition("/")[2] for link in files[WEIGHTS].get("chain", [])] for files in stored]
    first, second = ["0.e1", "1.e1", "2.e1"], ["3.e1", "4.e1", "5.e1"]
    assert chains == [[], first[:2], first, [], second[:2], second, [], ["6.e1", "7.e1"]]
    assert [len(files["config.json"].get("chain", [])) for files in stored] == [0, 2, 3, 0, 2, 3, 0, 2]
    whole = stored[4][WEIGHTS]["chain"][0]
    assert {key: stored[3][WEIGHTS][key] for key in ("sha256", "bytes")} == {
        key: whole[key] for key in ("sha256", "bytes")
    }


def test_a_file_that_is_as_before_stores_nothing(versions: Versions) -> None:
    content = safetensors(bytes(NUM_BYTES))
    versions.add(1, model=content, config=b"{}")
    files = versions.add(2, model=content, config=b'{"a": 1}')
    assert files[WEIGHTS]["chain"][-1] == {"version": "run-1/2.e1", "bytes": 0}
    assert "chain" not in files["config.json"], "a changed file without tensors is stored whole"
    assert list(versions.deltas(2).iterdir()) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(bytes(NUM_BYTES), random.Random(1).randbytes(NUM_BYTES), id="other numbers"),
        pytest.param(bytes(NUM_BYTES), bytes(NUM_BYTES - 2) + b"\1\1\1\1", id="another size"),
    ],
)
def test_a_delta_that_saves_nothing_is_not_stored(versions: Versions, before: bytes, after: bytes) -> None:
    versions.add(1, model=safetensors(before))
    assert "chain" not in versions.add(2, model=safetensors(after))[WEIGHTS]


def test_files_of_another_layout_are_stored_whole(versions: Versions) -> None:
    """The same bytes after a header of the same size, which names another tensor."""
    data = bytes(NUM_BYTES)
    versions.add(1, model=safetensors(data, "first_"))
    assert "chain" not in versions.add(2, model=safetensors(data, "second"))[WEIGHTS]
    assert "chain" in versions.add(3, model=safetensors(data[:-1] + b"\1", "second"))[WEIGHTS]


def test_a_file_without_an_intact_predecessor_is_stored_whole(versions: Versions) -> None:
    data = random.Random(0).randbytes(NUM_BYTES)
    versions.add(1, model=safetensors(data))
    (versions.home / "run-1" / "1.e1" / WEIGHTS).write_bytes(safetensors(changed(data, 0.001, 0)))
    files = versions.add(2, model=safetensors(changed(data, 0.001, 1)), model_b=safetensors(data))
    assert not any("chain" in file for file in files.values())


def test_adapters_are_stored_whole(versions: Versions) -> None:
    def adapter(step: int) -> dict[str, JsonObject]:
        return versions.add(step, adapter_model=safetensors(bytes(NUM_BYTES) + bytes([step, 0])))

    assert adapter_files.WEIGHTS in adapter(1)
    assert not any("chain" in file for file in adapter(2).values())
