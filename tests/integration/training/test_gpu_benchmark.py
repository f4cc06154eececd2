"""`python -m tests.benchmarks.gpu` in its toy size: every part of it runs, and without a GPU it refuses."""

import json
import os
import subprocess
import sys

import pytest

from tests.benchmarks.training import GPU_CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a dozen processes, each of which imports torch


def bench(*options: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.benchmarks.gpu", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_toy_size_measures_every_part() -> None:
    done = bench("--cpu-toy", "--seconds", "1500")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["left_out"] == [] and found["card"] is None
    (size,) = found["sizes"]
    for way in ("ours", "plain", "lora"):
        assert size[way]["tokens_per_second"] > 0
        assert size["against_float32"][way]["mean_abs_logprob_difference"] < 0.05
    for case in found["trees"]:
        assert case["ratios"].keys() == {"seconds"} and case["ways"]["packed"]["relative_gradient_error"] < 1e-4


def test_without_time_everything_is_named_as_left_out() -> None:
    found = json.loads(bench("--cpu-toy", "--seconds", "0").stdout)
    assert len(found["left_out"]) == 4 + len(GPU_CASES) and all("time was over" in one for one in found["left_out"])


def test_without_a_gpu_it_refuses() -> None:
    done = bench()
    assert done.returncode == 1 and "needs a GPU" in done.stderr and not done.stdout
