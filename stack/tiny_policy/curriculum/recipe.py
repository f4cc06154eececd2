"""The curriculum's policy: its numbers, and the mix of what its expert does."""

import random

from stack.tiny_policy.curriculum.expert import write_transcript
from stack.tiny_policy.curriculum.tasks import FAMILIES_OF, RepositoryTask, draw_repository, held_out_tasks, train_tasks
from stack.tiny_policy.settings import Recipe, TinyPolicySettings

CLEAN_MIX = {"good": 0.5, "second_try": 0.3, "third_try": 0.2}

# The expert rarely goes on after a failed check, so that verdicts can teach it.
NOISY_MIX = {
    "good": 0.22,
    "second_try": 0.10,
    "third_try": 0.05,
    "quits": 0.28,
    "unchecked": 0.12,
    "no_change": 0.10,
    "wrong_file": 0.05,
    "give_up": 0.08,
}


def draw_task(rng: random.Random, kind: str) -> RepositoryTask:
    return draw_repository(rng, kind, rng.choice(list(FAMILIES_OF[kind])))


CURRICULUM = Recipe(
    TinyPolicySettings(noisy_mix=NOISY_MIX, max_turns=7),
    CLEAN_MIX,
    draw_task,
    tuple(FAMILIES_OF),
    train_tasks,
    held_out_tasks,
    write_transcript,
)
