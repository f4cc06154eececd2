"""Imports: workers plan without torch or Ray, and torch and transformers alone are enough for a training step."""

import subprocess
import sys

LIGHT = (
    "engine.policy_files",
    "training.advantage",
    "training.packing",
    "training.plan_builder",
    "training.planner",
    "training.prefix_tree",
    "training.service",
)


def test_no_torch_and_no_ray() -> None:
    """One process imports them all, and names the first one that brings torch or Ray."""
    program = (
        "import importlib, sys\n"
        f"for name in {LIGHT}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = [one for one in ('torch', 'ray', 'transformers') if one in sys.modules]\n"
        "    assert not heavy, (name, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
