"""The policies that can be made on this machine, by the name that a config's `model` gives."""

from ratchet.config import TINY, TINY_CURRICULUM
from stack.tiny_policy.curriculum.recipe import CURRICULUM
from stack.tiny_policy.settings import QUICKSTART, Recipe

RECIPES: dict[str, Recipe] = {TINY: QUICKSTART, TINY_CURRICULUM: CURRICULUM}
