"""Let a model solve tasks against the simulated shell, in this process, to estimate its solve rate.

The self-check needs the rate before an engine or a box exists; the quickstart's own evaluation runs the real pipeline.

Shapes: B conversations, T tokens (padded on the left while sampling).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.conversation import TURN_END, called_command, observation_text, opening_text
from examples.tiny_policy.simulated_shell import Files, run_command


@dataclass(slots=True)
class Play:
    """One conversation in progress: `ids`, and parallel to them `sampled` and `logprobs` (0 for tokens not sampled)."""

    task: BugTask
    ids: list[int]
    files: Files
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)

    @property
    def solved(self) -> bool:
        """True if the files equal the fixed ones, which is the case for nearly every edit that passes the tests."""
        return self.ended and self.files == self.task.fixed_files


@torch.no_grad()
def sample_turns(
    model: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    stop_id: int,
    pad_id: int,
    max_tokens: int,
    temperature: float,
) -> list[tuple[list[int], list[float]]]:
    """Sample one turn per prompt, stop token included: (ids, logprobs at this temperature). Temperature 0 is greedy."""
    longest = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), longest), pad_id)
    mask_BT = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, longest - len(prompt) :] = 1
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    turns: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_tokens):
        output = model(
            input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, past_key_values=cache, logits_to_keep=1
        )
        logprobs_BV = (output.logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)
        chosen_B1 = torch.multinomial(logprobs_BV.exp(), 1) if temperature else logprobs_BV.argmax(-1, keepdim=True)
        chosen, logprobs = chosen_B1[:, 0].tolist(), logprobs_BV.gather(1, chosen_B1)[:, 0].tolist()
        for row in sorted(running):
            turns[row][0].append(chosen[row])
            turns[row][1].append(logprobs[row])
            if chosen[row] == stop_id:
                running.remove(row)
        if not running:
            break
        ids_BT, positions_BT = chosen_B1, positions_BT[:, -1:] + 1
        mask_BT = torch.cat([mask_BT, torch.ones(len(prompts), 1, dtype=torch.long)], 1)
    return turns


def play_tasks(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Sequence[BugTask],
    *,
    temperature: float,
    max_turns: int,
    max_tokens_per_turn: int,
) -> list[Play]:
    model.eval()
    stop_id, pad_id = tokenizer.convert_tokens_to_ids([TURN_END, "<|endoftext|>"])
    plays = []
    for task in tasks:
        play = Play(task, [], dict(task.files))
        play.append(tokenizer.encode(opening_text(task)))
        plays.append(play)
    for _ in range(max_turns):
        running = [play for play in plays if not play.ended]
        if not running:
            break
        turns = sample_turns(model, [play.ids for play in running], stop_id, pad_id, max_tokens_per_turn, temperature)
        for play, (ids, logprobs) in zip(running, turns, strict=True):
            play.append(ids, logprobs)
            take_turn(play, tokenizer, ids, stop_id)
    for play in plays:
        play.ended = True  # a turn limit or a truncated answer ends a rollout as well, and its changes are graded
    return plays


def take_turn(play: Play, tokenizer: PreTrainedTokenizerFast, ids: list[int], stop_id: int) -> None:
    command = called_command(tokenizer.decode(ids[:-1])) if ids[-1] == stop_id else None
    if command is None:
        play.ended = True
    else:
        play.append(tokenizer.encode(observation_text(run_command(command, play.files, dict(play.task.fixed_files)))))


def measure_solve_rate(plays: Sequence[Play]) -> float:
    return sum(play.solved for play in plays) / len(plays)
