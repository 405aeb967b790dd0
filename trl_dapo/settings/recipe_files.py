# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes and accelerate configurations by name, from a wheel or the repository. Needs only the standard library."""

from difflib import get_close_matches
from pathlib import Path


_IN_A_WHEEL, _IN_THE_REPOSITORY = Path(__file__).parents[1] / "recipes", Path(__file__).parents[2] / "recipes"
RECIPES = _IN_A_WHEEL if _IN_A_WHEEL.is_dir() else _IN_THE_REPOSITORY
ACCELERATE_CONFIGS = RECIPES / "accelerate"
_NUM_FIRST_LINES = 2  # the first lines of a recipe, which name its hardware and what it trains


def find_recipe(given: str, option: str = "--config", folder: Path = RECIPES) -> Path:
    """Return the file of a recipe, which is given as a path or as the name of a recipe of this package."""
    path = Path(given)
    if path.is_file():
        return path
    named = folder / f"{given.removesuffix('.yaml')}.yaml"
    is_name = path.name == given
    if is_name and named.is_file():
        return named
    message = f"`{option} {given}` is not a file"
    if is_name:
        message += f", and not one of {', '.join(names_in(folder))}"
        yaml_files = [each.name for each in Path().glob("*.yaml")]
        nearest = get_close_matches(given, yaml_files, n=1) or get_close_matches(named.stem, names_in(folder), n=1)
        if nearest:
            message += f". Nearest: {nearest[0]}"
    raise FileNotFoundError(f"{message}.")


def find_accelerate_config(given: str) -> Path:
    return find_recipe(given, "--accelerate_config", ACCELERATE_CONFIGS)


def names_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def list_recipes() -> str:
    """Return a list of all recipes, with their hardware and what they train, and how to launch one."""
    lines = []
    for name in names_in(RECIPES):
        first_lines = find_recipe(name).read_text().splitlines()[:_NUM_FIRST_LINES]
        lines += [name, *(f"  {line.removeprefix('# ')}" for line in first_lines), ""]
    lines += [
        "Show one:    trl-dapo recipes --show NAME",
        "Launch one:  trl-dapo train --config NAME [--accelerate_config CONFIG] [--field value ...]",
        f"CONFIG:      {', '.join(names_in(ACCELERATE_CONFIGS))}",
        f"Files in:    {RECIPES}",
    ]
    return "\n".join(lines)
