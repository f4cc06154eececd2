"""TRL's GRPO loss on one of our batches: its trainer class and forward pass, our tokens instead of its generation.

The agreement test and the benchmark compare with the same code. TRL is a dev dependency; the product never imports it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.plan_types import Member, TrainingSequence


def _filled(rows: Sequence[Any], dtype: torch.dtype, left: bool) -> Tensor:
    width = max(len(row) for row in rows)
    out = torch.zeros(len(rows), width, dtype=dtype)
    for number, row in enumerate(rows):
        part = slice(width - len(row), width) if left else slice(0, len(row))
        out[number, part] = torch.as_tensor(row, dtype=dtype)
    return out


class TrlStep:
    """One model in TRL's trainer, loaded in float32. `loss_type` and the other options are GRPOConfig's."""

    def __init__(self, model_path: Path, directory: Path, micro_batch: int, group_size: int, **options: Any) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        from datasets import Dataset

        self.micro_batch = micro_batch
        arguments = {
            "output_dir": str(directory),
            "use_cpu": True,
            "report_to": [],
            "bf16": False,
            "gradient_checkpointing": False,
        }
        arguments |= {
            "per_device_train_batch_size": micro_batch,
            "num_generations": group_size,
            "generation_batch_size": group_size,
        }
        arguments |= {"beta": 0.0, "disable_dropout": True}
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(**{**arguments, **options}),
            train_dataset=Dataset.from_list([{"prompt": "unused"}] * group_size),
            processing_class=AutoTokenizer.from_pretrained(model_path),
        )

    def batch(
        self,
        chains: Sequence[TrainingSequence],
        members: dict[int, Member],
        reference: Sequence[Tensor] | None = None,
    ) -> list[dict[str, Tensor]]:
        """Return micro-batches. The prompt ends at the first trained token; `tool_mask` has untrained ones after it.

        `reference`: per chain, the reference's logprob of each token, for the option `beta`.
        """
        starts = [int(one.mask.argmax()) for one in chains]
        num_items = torch.tensor(float(sum(int(one.mask.sum()) for one in chains)))
        micro = []
        for first in range(0, len(chains), self.micro_batch):
            part = list(zip(chains, starts, strict=True))[first : first + self.micro_batch]
            prompts, answers = [one.ids[:start] for one, start in part], [one.ids[start:] for one, start in part]
            ones = ([[1] * len(row) for row in prompts], [[1] * len(row) for row in answers])
            micro.append(
                {
                    "prompt_ids": _filled(prompts, torch.long, True),
                    "prompt_mask": _filled(ones[0], torch.long, True),
                    "completion_ids": _filled(answers, torch.long, False),
                    "completion_mask": _filled(ones[1], torch.long, False),
                    "tool_mask": _filled([one.mask[start:] for one, start in part], torch.long, False),
                    "old_per_token_logps": _filled(
                        [one.behaviour[start:] for one, start in part], torch.float32, False
                    ),
                    "advantages": torch.tensor([members[one.rollout_id].advantage for one, _ in part]),
                    "num_items_in_batch": num_items,
                }
            )
            if reference is not None:
                scores = [reference[first + n][start:] for n, (_, start) in enumerate(part)]
                micro[-1]["ref_per_token_logps"] = _filled(scores, torch.float32, False)
        return micro

    def gradients(self, micro: Sequence[dict[str, Tensor]]) -> float:
        """Run forward and backward over all micro-batches, accumulated as in one optimiser step; return the loss."""
        trainer, model = self.trainer, self.trainer.model
        model.train()
        model.zero_grad(set_to_none=True)
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(micro)
        total = 0.0
        for inputs in micro:
            loss = trainer._compute_loss(model, inputs)
            loss.backward()
            total += float(loss.detach())
        return total

    def gradient(self) -> Tensor:
        """Return the gradient of the whole model, flat."""
        return torch.cat(
            [parameter.grad.flatten() for parameter in self.trainer.model.parameters() if parameter.grad is not None]
        )
