"""Version 0 of a run is made once, although rollouts that are started by hand make it at the same moment."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from engine.policy_files import link_version

CALLS = 8


def test_calls_at_the_same_moment_make_one_version(tmp_path: Path) -> None:
    model, directory = tmp_path / "model", tmp_path / "policies" / "adhoc-1" / "0.e0"
    model.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (model / name).write_bytes(name.encode() * 1000)
    barrier = Barrier(CALLS)

    def link(_: int) -> str:
        barrier.wait()
        return repr(link_version(model, directory))

    with ThreadPoolExecutor(CALLS) as pool:
        described = set(pool.map(link, range(CALLS)))
    assert len(described) == 1
    assert list(directory.parent.iterdir()) == [directory]
