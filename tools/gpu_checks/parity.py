"""Losses, gradients and parameters of N-rank layouts, three steps in float64, against one process on the CPU."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from gpu_checks.found import Found, Place
from gpu_checks.ranks import run_ranks
from hetmesh.boundary import World
from hetmesh.recipe.recipe import Recipe, load_recipe
from hetmesh.testing.parity import TOLERANCE, Outcome, ParityError, compare, reference
from hetmesh.testing.parity import run as run_layout

RECIPES = Path(__file__).parents[2] / "recipes"
RANKS = 4
LAYOUTS = {  # recipe -> samples per LLM lane: every lowering, and several schedules
    "digits": 4,
    "digits_colocated": 4,
    "digits_fsdp": 4,
    "digits_cp_pp": 16,
    "digits_bubble_fill": 16,
}
MORE = {"digits_overlapping": 4, "digits_zero_bubble": 16, "digits_interleaved": 16, "digits_balanced": 16}
"""Those that a CPU leaves to the tests of the suite."""
EIGHT = {
    "parallelism.vision.ranks": "0-3",
    "parallelism.vision.data_parallel_shard_degree": 4,
    "parallelism.llm.ranks": "0-7",
    "parallelism.llm.data_parallel_shard_degree": 4,
}
STEPS = 3


def run(place: Place) -> Found:
    """The largest error of each layout."""
    place.need_kernels("digits of losses and gradients")
    layouts = LAYOUTS | (MORE if place.on_gpu else {})
    errors = _errors({name: recipe(name, local) for name, local in layouts.items()}, RANKS, place)
    left_out = {} if place.on_gpu else {", ".join(MORE): "on a CPU the suite trains them"}
    if place.gpus >= 8:
        errors |= _errors({"digits_fsdp on 8": recipe("digits_fsdp", 4, **EIGHT)}, 8, place)
    else:
        left_out["eight ranks"] = f"this machine has {place.gpus} GPUs" if place.on_gpu else "one GPU each is needed"
    figures = {"ranks": RANKS, "backend": "nccl" if place.on_gpu else "gloo", "errors": errors}
    return Found({**figures, "max_error": max(errors.values())}, {"max_error": TOLERANCE["float64"]}, left_out)


def recipe(name: str, local: int, **overrides: object) -> Recipe:
    """In float64, with a small batch."""
    keys = {"training.dtype": "float64", "training.local_batch_size": local, **overrides}
    return load_recipe(RECIPES / f"{name}.toml", [f"--{key}={value}" for key, value in keys.items()])


def _errors(recipes: dict[str, Recipe], ranks: int, place: Place) -> dict[str, float]:
    """All in the same processes, one after the other."""
    outcomes = run_ranks(outcomes_of, ranks, place, recipes, timeout=500)
    errors = {}
    for name, each in recipes.items():
        began = time.monotonic()
        try:
            errors[name] = compare(reference(each, STEPS), [of_rank[name] for of_rank in outcomes], float("inf"))
        except ParityError as error:  # a gradient on one side only
            raise ParityError(f"{name}: {error}") from error
        print(f"{name}: largest error {errors[name]:.1e} (one process: {time.monotonic() - began:.1f} s)", flush=True)
    return errors


def outcomes_of(world: World, recipes: dict[str, Recipe]) -> dict[str, Outcome]:
    """What this rank has of each, on the CPU."""
    found = {}
    for name, each in recipes.items():
        print(f"began {name}", flush=True)
        try:
            found[name] = _on_host(run_layout(each, world, STEPS))
        except Exception as error:
            raise RuntimeError(f"layout {name}: {error}") from error
    return found


def _on_host(outcome: Outcome) -> Outcome:
    def moved(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {name: None if t is None else t.cpu() for name, t in tensors.items()}

    gradients, parameters = (moved(dict(t)) for t in (outcome.gradients, outcome.parameters))
    return replace(outcome, gradients=gradients, parameters={k: t for k, t in parameters.items() if t is not None})
