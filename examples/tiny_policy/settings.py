"""All numbers of the tiny policy, and the digest that identifies a policy made from them.

The same settings and seed give the same policy; a policy of other settings has another digest and is made anew.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources

from examples.tiny_policy.bug_tasks import FAMILIES, BugTask, draw_task, held_out_tasks, train_tasks
from examples.tiny_policy.conversation import Conversation, Expert, Piece
from examples.tiny_policy.transcripts import PLAYS

GOOD: Mapping[str, float] = {"good": 1.0}

# The most common behaviour is a wrong one, so that greedy decoding can also improve through verdicts.
NOISY_MIX: Mapping[str, float] = {
    "no_change": 0.46,
    "good": 0.27,
    "give_up": 0.09,
    "blind": 0.08,
    "wrong_edit": 0.05,
    "unparsed": 0.025,
    "wrong_file": 0.025,
}


@dataclass(frozen=True, slots=True)
class TinyPolicySettings:
    """Model and warm start. `initializer_range` is large because copying from the context is the bottleneck: no
    copying circuit forms with the usual 0.02."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    head_dim: int = 32
    feed_forward_size: int = 384
    initializer_range: float = 0.08
    max_context_tokens: int = 2048
    max_vocabulary: int = 2000
    num_tokenizer_transcripts: int = 2000
    num_clean_updates: int = 840
    num_noisy_updates: int = 240
    transcripts_per_update: int = 16
    learning_rate: float = 3e-3
    num_warmup_updates: int = 20
    adam_betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    context_loss_weight: float = 0.1
    max_gradient_norm: float = 1.0
    num_threads: int = 2
    """Part of the digest, because another number of threads rounds sums differently. Two threads save a third of the
    time on idle cores, which `make train` has while it makes the policy."""
    noisy_mix: Mapping[str, float] = field(default_factory=lambda: dict(NOISY_MIX))

    # gates of the self-check
    num_clean_checks: int = 128
    num_solve_checks: int = 256
    min_clean_exact: float = 0.70
    min_solve_rate: float = 0.15
    max_solve_rate: float = 0.45
    max_turns: int = 4
    max_tokens_per_turn: int = 64


def template_text() -> str:
    return resources.files("examples.tiny_policy").joinpath("chat_template.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Recipe:
    """The recipe of a tiny policy: its numbers, and the tasks and the expert that its warm start imitates."""

    settings: TinyPolicySettings
    draw_task: Callable[[random.Random, str], BugTask]
    """Draws a task of a kind of families."""
    kinds: tuple[str, ...]
    """The kinds of families. The first is that of the warm start and its checks."""
    train_tasks: Callable[[], Sequence[BugTask]]
    held_out_tasks: Callable[[], Sequence[BugTask]]
    plays: Mapping[str, Expert]
    """The expert's acts by the names in `noisy_mix`."""

    def write_transcript(self, task: BugTask, rng: random.Random, mix: Mapping[str, float]) -> list[Piece]:
        """Return one conversation, of a kind drawn by the weights of `mix` (names of `plays`)."""
        kind = rng.choices(list(mix), list(mix.values()))[0]
        talk = Conversation(task)
        self.plays[kind](talk, task, rng)
        return talk.pieces

    def new_tasks(self, rng: random.Random, kind: str | None = None) -> Iterator[BugTask]:
        """Yield tasks of a kind, by default the warm start's, none of which is in a dataset."""
        excluded = {task.digest for task in [*self.train_tasks(), *self.held_out_tasks()]}
        while True:
            task = self.draw_task(rng, kind or self.kinds[0])
            if task.digest not in excluded:
                yield task


def draw_quickstart_task(rng: random.Random, _kind: str) -> BugTask:
    return draw_task(rng, rng.choice(list(FAMILIES)))


QUICKSTART = Recipe(TinyPolicySettings(), draw_quickstart_task, ("warm",), train_tasks, held_out_tasks, PLAYS)


def recipe_digest(recipe: Recipe) -> str:
    """Cover the numbers, the template and, through a sample of transcripts, the tasks, expert, prompts and formats."""
    rng = random.Random(0)
    mix, sample = recipe.settings.noisy_mix, []
    for _ in range(100):
        pieces = recipe.write_transcript(recipe.draw_task(rng, recipe.kinds[0]), rng, mix)
        sample.append("".join(piece.text for piece in pieces))
    content = json.dumps([asdict(recipe.settings), template_text(), sample], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
