"""Making the policy: complete or not at all, once per settings and seed, refused if a gate is missed.

The gates and the directory do not depend on what the model learned, so this one trains for two updates.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_policy.bug_tasks import FAMILIES, held_out_tasks, task_digests, train_tasks
from examples.tiny_policy.build import (
    REPORT_FILE,
    SHIPPED,
    TinyPolicyReport,
    WeakPolicyError,
    check_gates,
    make_tiny_policy,
    read_report,
)
from examples.tiny_policy.settings import QUICKSTART, TinyPolicySettings, recipe_digest
from ratchet.errors import MachineError, UserError

TOY_SETTINGS = TinyPolicySettings(
    num_threads=1,
    num_layers=1,
    num_tokenizer_transcripts=100,
    num_clean_updates=1,
    num_noisy_updates=1,
    transcripts_per_update=2,
    num_clean_checks=4,
    num_solve_checks=4,
    max_turns=1,
    max_tokens_per_turn=4,
    min_clean_exact=-1.0,
    min_solve_rate=0.0,
)
TOY = replace(QUICKSTART, settings=TOY_SETTINGS)


def test_a_made_policy_is_complete_reproducible_and_made_once(tmp_path: Path) -> None:
    said: list[str] = []
    first = make_tiny_policy(tmp_path / "a", 5, said.append, TOY)
    again = make_tiny_policy(tmp_path / "a", 5, said.append, TOY)
    assert again == first
    assert "exists already" in said[-1]
    assert make_tiny_policy(tmp_path / "b", 5, said.append, TOY).recipe == recipe_digest(TOY)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert model.dtype == torch.float32
    assert (
        model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    assert tokenizer.chat_template
    assert json.loads((tmp_path / "a" / REPORT_FILE).read_text())["seed"] == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_shipped_policy_is_that_of_the_recipe_and_is_copied(tmp_path: Path) -> None:
    """If the recipe has changed: remove the directory, and `ratchet models tiny-policy --out` makes it anew."""
    report = read_report(SHIPPED)
    assert report is not None
    assert (report.recipe, report.seed) == (recipe_digest(QUICKSTART), 0)
    check_gates(report, QUICKSTART.settings)
    assert make_tiny_policy(tmp_path / "p", 0, lambda _: None) == report
    for file in SHIPPED.iterdir():
        assert (tmp_path / "p" / file.name).read_bytes() == file.read_bytes()
        assert (tmp_path / "p" / file.name).stat().st_mode & 0o777 == 0o644


def test_another_seed_replaces_the_policy(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_tiny_policy(tmp_path / "p", seed, lambda _: None, TOY)
        assert json.loads((tmp_path / "p" / REPORT_FILE).read_text())["seed"] == seed


def test_a_missed_gate_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(WeakPolicyError, match="seed 0"):
        make_tiny_policy(
            tmp_path / "p", 0, lambda _: None, replace(TOY, settings=replace(TOY_SETTINGS, min_clean_exact=0.7))
        )
    assert list(tmp_path.iterdir()) == []


def test_foreign_content_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(MachineError, match="is not a tiny policy"):
        make_tiny_policy(tmp_path, 0, lambda _: None, TOY)
    with pytest.raises(MachineError):
        make_tiny_policy(tmp_path / "mine" / "p", 0, lambda _: None, TOY)
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("clean_exact", "solve_rate", "complaint"),
    [(0.7, 0.3, "70%"), (0.9, 0.14, "15% to 45%"), (0.9, 0.46, "15% to 45%"), (0.9, 0.15, None), (0.9, 0.45, None)],
)
def test_gates(clean_exact: float, solve_rate: float, complaint: str | None) -> None:
    report = TinyPolicyReport("d", 0, 1, 1, clean_exact, solve_rate, 0.5, 1.0)
    if complaint is None:
        check_gates(report, TinyPolicySettings())
    else:
        with pytest.raises(UserError, match=complaint):
            check_gates(report, TinyPolicySettings())


def test_the_recipe_digest_follows_the_numbers() -> None:
    assert recipe_digest(QUICKSTART) == "e474711833bcd2ee", "an upgrade makes the policy of a run in progress anew"
    other = replace(QUICKSTART, settings=replace(QUICKSTART.settings, learning_rate=1e-3))
    assert recipe_digest(QUICKSTART) != recipe_digest(other)


def test_the_warm_start_never_sees_a_task_of_the_dataset() -> None:
    excluded = task_digests([*train_tasks(), *held_out_tasks()])
    tasks = QUICKSTART.new_tasks(random.Random(0))
    drawn = [next(tasks) for _ in range(5000)]
    assert not excluded & task_digests(drawn)
    assert {task.family for task in drawn} == set(FAMILIES)
