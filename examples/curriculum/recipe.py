"""The curriculum's policy: its numbers, and the mix of what its expert does."""

import random

from examples.curriculum.expert import REPOSITORY_PLAYS
from examples.curriculum.tasks import FAMILIES_OF, draw_repository, held_out_repositories, train_repositories
from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.settings import Recipe, TinyPolicySettings

WARM_START, RANDOM_SHARE = "warm start", 0.6

# The expert rarely goes on after a failed check, so that verdicts can teach it.
CURRICULUM_MIX = {
    "good": 0.22,
    "second_try": 0.10,
    "third_try": 0.05,
    "quits": 0.28,
    "unchecked": 0.12,
    "no_change": 0.10,
    "wrong_file": 0.05,
    "give_up": 0.08,
}


def draw_curriculum_task(rng: random.Random, kind: str) -> BugTask:
    if kind == WARM_START:
        kind = "random" if rng.random() < RANDOM_SHARE else "warm"
    return draw_repository(rng, kind, rng.choice(list(FAMILIES_OF[kind])))


CURRICULUM = Recipe(
    TinyPolicySettings(
        num_clean_updates=4800, num_noisy_updates=300, min_clean_exact=0.6, max_turns=7, noisy_mix=CURRICULUM_MIX
    ),
    draw_curriculum_task,
    (WARM_START, "warm", "new", "unseen"),
    train_repositories,
    held_out_repositories,
    REPOSITORY_PLAYS,
)
