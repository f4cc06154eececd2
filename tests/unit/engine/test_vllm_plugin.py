"""The plug-in's checks of weight files before the first tensor is loaded, and how vLLM's processes wait on a CPU.

A refused update must leave the weights as they are, for any bad file. The update in the real vLLM is tested in
tests/integration/engine/test_vllm_plugin.py.
"""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from engine.policy_files import file_sha256
from engine.vllm_plugin import checked_paths, read_tensors, sleeping_wait


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Two files of one policy, as names relative to the root."""
    names = []
    for number in (1, 2):
        name = f"3.e1/model-0000{number}-of-00002.safetensors"
        (tmp_path / "3.e1").mkdir(exist_ok=True)
        save_file({f"layer.{number}": torch.full((64,), float(number))}, tmp_path / name)
        names.append(name)
    return names


def digests(root: Path, names: list[str]) -> list[str]:
    return [file_sha256(root / name) for name in names]


def test_all_shards_load_once_all_digests_are_right(tmp_path: Path, shards: list[str]) -> None:
    found = dict(read_tensors(checked_paths(tmp_path, shards, digests(tmp_path, shards))))
    assert {name: float(value.mean()) for name, value in found.items()} == {"layer.1": 1.0, "layer.2": 2.0}


@pytest.mark.parametrize("damage", ["one bit", "cut short", "gone"])
def test_a_bad_second_shard_is_found_before_the_first_is_loaded(tmp_path: Path, shards: list[str], damage: str) -> None:
    expected = digests(tmp_path, shards)
    second = tmp_path / shards[1]
    data = bytearray(second.read_bytes())
    data[-7] ^= 1
    second.write_bytes(data if damage == "one bit" else data[:-32])
    if damage == "gone":
        second.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match="00002-of-00002"):
        checked_paths(tmp_path, shards, expected)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "3.e1/config.json"])
def test_only_weight_files_below_the_root_are_read(tmp_path: Path, shards: list[str], name: str) -> None:
    with pytest.raises(ValueError, match="no safetensors file below"):
        checked_paths(tmp_path, [name], ["00"])


def test_every_file_has_a_digest(tmp_path: Path, shards: list[str]) -> None:
    for files, sha256 in (([], []), (shards, digests(tmp_path, shards)[:1])):
        with pytest.raises(ValueError, match="expected as many of each"):
            checked_paths(tmp_path, files, sha256)


def test_a_process_sleeps_until_the_other_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a read, a message may come without waking its reader; later, each message wakes it."""
    import zmq
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    yields: list[None] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: yields.append(None))
    wait = sleeping_wait(shm_broadcast.SpinCondition.wait)
    with zmq.Context() as context:
        address = get_open_zmq_ipc_path()
        writer = shm_broadcast.SpinCondition(is_reader=False, context=context, notify_address=address)
        reader = shm_broadcast.SpinCondition(is_reader=True, context=context, notify_address=address)
        reader.record_read()
        wait(reader)  # returns without a message
        reader.last_read -= 2
        waiting = threading.Thread(target=wait, args=(reader,))
        waiting.start()
        while waiting.is_alive():  # a message is lost until the reader has subscribed
            writer.notify()
            waiting.join(0.01)
        for socket in (writer.local_notify_socket, reader.local_notify_socket, reader.write_cancel_socket):
            socket.close(linger=0)
        reader.read_cancel_socket.close(linger=0)
    assert not yields


def test_the_time_of_a_sleep() -> None:
    slept: list[int | None] = []
    now = [10.0]
    wait = sleeping_wait(lambda _, timeout_ms: slept.append(timeout_ms), clock=lambda: now[0])
    condition = SimpleNamespace(last_read=10.0)
    for now[0] in (10.0, 10.9, 11.1):
        wait(condition, 5000)
    wait(condition)
    assert slept == [1, 1, 5000, None]
