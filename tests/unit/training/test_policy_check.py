"""The check of a loaded policy tells rounding from another function."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.training.cuts import make_config
from training import attention_kernels, policy_check, policy_model
from training.learner import RankLearner
from training.policy_inputs import PolicyInputs

pytestmark = pytest.mark.usefixtures("single_rank")


def scale_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    right = policy_model.chosen_logprobs
    monkeypatch.setattr(policy_model, "chosen_logprobs", lambda hidden, *more: right(hidden * 1.3, *more))


def hide_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch sees its own tokens only, as in a short window."""
    right = policy_model.group_blocks

    def wrong(segments: Any, *more: Any) -> Any:
        root, rest, branch = segments
        return right([replace(root, subtree_end=rest.end), rest, branch], *more)

    monkeypatch.setattr(policy_model, "group_blocks", wrong)


def count_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch's positions go on after those of the chain that it leaves."""
    right = policy_check.make_inputs

    def wrong(*given: Any) -> PolicyInputs:
        found = right(*given)
        assert found.positions is not None
        return replace(found, positions=torch.arange(found.positions.shape[1])[None])

    monkeypatch.setattr(policy_check, "make_inputs", wrong)


def lose_branch_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix gets no gradient from its branches: the forward pass is right."""
    right = attention_kernels.backward

    def wrong(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = right(*given)
        return (query, key, value) if given[5].causal else (query, torch.zeros_like(key), torch.zeros_like(value))

    monkeypatch.setattr(attention_kernels, "backward", wrong)


FUNCTION, GRADIENT = "changes its logits .* or mixes tokens", "gradient of a batch differs"
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (scale_logits, FUNCTION),
    (hide_the_prefix, FUNCTION),
    (count_on, f"{FUNCTION}|{GRADIENT}"),
    (lose_branch_gradients, GRADIENT),
]


def test_rounding_alone_is_no_other_function(model: Path, tmp_path: Path) -> None:
    """Keys so large that each head looks at few tokens: bfloat16 rounds the gradient far more than that of a text."""
    coarse = tmp_path / "coarse"
    shutil.copytree(model, coarse)
    weights = load_file(coarse / "model.safetensors")
    found = {name: one * 20 if "k_norm" in name else one for name, one in weights.items()}
    save_file(found, coarse / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="this dtype rounds the model's values much .* float32 rounds less"):
        RankLearner(coarse, make_config(dtype="bfloat16"))
    RankLearner(coarse, make_config(dtype="float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_another_function_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, fault: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    fault(monkeypatch)
    with pytest.raises(ValueError, match=message):
        RankLearner(model, make_config(dtype=dtype))
