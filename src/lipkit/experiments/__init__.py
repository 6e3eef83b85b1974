"""Runs described by recipes: ``train`` makes one, from data to certificates; ``certify`` measures it again."""

from lipkit.experiments.recipe import load_recipe, names
from lipkit.experiments.recipe_schema import Recipe
from lipkit.experiments.run import Display, Outcome, certify, read_recipe, train

__all__ = ["Display", "Outcome", "Recipe", "certify", "load_recipe", "names", "read_recipe", "train"]

__dir__ = __all__.copy
