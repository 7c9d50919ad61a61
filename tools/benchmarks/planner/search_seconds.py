"""How long a search takes: CPU seconds of this one process, for a recipe on many ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hetmesh.planner import search
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.planning import recipe_problem
from hetmesh.resolve.resolved import resolve

RECIPE = "siglip_qwen3_8b"
BATCHES = {256: 1024, 3072: 6144}
"""Samples of a step, by ranks."""


def search_seconds(ranks: int) -> dict[str, Any]:
    """The search alone, after a recipe has been read and its samples have been drawn."""
    path = Path(__file__).parents[3] / "recipes" / f"{RECIPE}.toml"
    recipe = load_recipe(path, [f"--training.global_batch_size={BATCHES[ranks]}"])
    started = time.process_time()
    problem = recipe_problem(resolve(recipe), machine="h100", ranks=ranks)
    ready = time.process_time()
    found = search(problem)
    stopped = time.process_time()
    assert found.fastest is not None
    return {
        "recipe": RECIPE,
        "ranks": ranks,
        "global_batch_size": BATCHES[ranks],
        "search_s": stopped - ready,
        "problem_s": ready - started,
        "considered": found.considered,
        "simulated": found.simulated,
        "best": str(found.fastest.plan),
    }
