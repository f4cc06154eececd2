"""Imports: workers plan without torch or Ray, and torch and transformers alone are enough for a training step."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "training.advantage",
        "training.loss_reducers",
        "training.planner",
        "training.plan_builder",
        "training.plan_loader",
        "training.packing",
        "training.prefix_tree",
        "engine.policy_files",
    ],
)
def test_no_torch_and_no_ray(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
        == "[]"
    )


def test_the_service_itself_needs_no_torch() -> None:
    program = "import sys, training.service; print([name for name in ('torch', 'ray') if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
        == "[]"
    )


ABSENT = (
    "datasets",
    "fastapi",
    "httpx",
    "orjson",
    "pydantic",
    "ray",
    "sqlalchemy",
    "structlog",
    "temporalio",
    "trl",
    "vllm",
    "zstandard",
)
"""Our other dependencies. A module that is None in sys.modules cannot be imported."""


def test_a_step_and_its_benchmark_need_torch_and_transformers_alone() -> None:
    program = (
        f"import sys; sys.modules |= dict.fromkeys({ABSENT}, None); import tests.benchmarks.training, training.learner"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
