"""The checks before a run starts, without any part of the stack."""

from pathlib import Path

import pytest

from ratchet.config_sources import load_config
from ratchet.errors import DatasetError
from stack.startup import check_start

ROOT = Path(__file__).parents[3]


def test_needs_of_tasks_are_compared_before_the_start(tmp_path: Path) -> None:
    for name, text in {
        "instruction.md": "do it\n",
        "tests/test.sh": "true\n",
        "task.toml": '[environment]\ndocker_image = "host"\n[verifier]\ntimeout_sec = 100000\n',
    }.items():
        (tmp_path / "one" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "one" / name).write_text(text)
    config = load_config(ROOT / "configs/quickstart.yaml", [f"datasets=[{{path: {tmp_path}}}]"])
    with pytest.raises(DatasetError, match=r"limits\.eval_seconds of 100000, found [\d.]+: 1 tasks: one"):
        check_start(config, lambda _: None)
    said: list[str] = []
    check_start(config, said.append, compares_needs=False)
    assert said[-1] == f"{tmp_path}: 1 tasks for train", "an open run goes on"
    limits = config.limits.model_copy(update={"eval_seconds": 100_000.0})
    check_start(config.model_copy(update={"limits": limits}), said.append)
    assert said[-1] == f"{tmp_path}: 1 tasks for train"
