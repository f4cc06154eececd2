"""The policies that can be made on this machine, by the name that a config's `model` gives."""

from examples.curriculum.recipe import CURRICULUM
from examples.tiny_policy.settings import QUICKSTART, Recipe
from ratchet.config import TINY, TINY_CURRICULUM

RECIPES: dict[str, Recipe] = {TINY: QUICKSTART, TINY_CURRICULUM: CURRICULUM}
