"""What a resumed run takes from its recipe and what from its checkpoint: changed keys are named, taken or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetmesh.boundary import World
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.training.checkpointing.reading import opened, read_into

FREE = frozenset({"job", "checkpoint", "metrics", "profiling", "comm", "validation"})
"""Tables that say nothing about what is trained: not worth a word."""

REFUSED = frozenset({"data.source", "data.mixture", "training.dtype", "debug.seed"})
"""Keys without which the saved state or position means something else."""

RUN = "extra.run"
"""What `run_state` is called in a checkpoint."""

ADVICE = (
    "restore it, or start a new run from the saved weights: checkpoint.initial_load_path and another job.dump_folder"
)

_SHOWN = 8  # changes that a message names

Changes = dict[str, tuple[Any, Any]]
"""Dotted key -> its value in the checkpoint and in the recipe."""


def run_state(recipe: Recipe, so_far: Mapping[str, Any]) -> str:
    """What a checkpoint says about its run: the recipe, and what the summary of a resumed run tells of earlier steps
    (the last loss, steps and samples skipped)."""
    return json.dumps({"recipe": recipe.model_dump(mode="json", by_alias=True), **so_far})


def saved_run(world: World, path: Path) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """What `run_state` put into the checkpoint at `path`: the recipe, None in an older or damaged one (loading it says
    what is damaged), and what there was so far. Collective."""
    state = {RUN: ""}
    try:
        saved, sums = opened(world, path)
        if RUN in saved:
            read_into(world, path, state, {part: crc for part, crc in sums.items() if part.name == RUN})
    except CheckpointError:
        return None, {}
    found = json.loads(state[RUN] or "{}")
    return found.pop("recipe", None), found


def changes(saved: Mapping[str, Any] | None, recipe: Recipe) -> Changes:
    """The keys in which `recipe` differs from the one that was saved; empty if none was."""
    if saved is None:
        return {}
    old, new = _flat(saved), _flat(recipe.model_dump(mode="json", by_alias=True))
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def check_changes(found: Changes, checkpoint: Path) -> None:
    """Refuse changes of what a resumed run cannot change.

    Raises:
        RecipeError: names the key, both values and what to do.
    """
    for key, (old, new) in found.items():
        family = key == "optimizer.name" and "SGD" in (old, new)  # Adam and AdamW have the same state
        if key in REFUSED or family:
            raise RecipeError(
                f"{key} = {_shown(new)}: the checkpoint {checkpoint} is of a run with {_shown(old)}; {ADVICE}"
            )


def described(found: Changes) -> str:
    """Changes as text: `optimizer.lr 0.002 -> 0.001, ...`; empty if there are none, cut short if there are many."""
    told = [f"{key} {_shown(old)} -> {_shown(new)}" for key, (old, new) in found.items()]
    return ", ".join(told[:_SHOWN]) + (f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, each in value.items():
        name = f"{prefix}{key}"
        if name in FREE:
            continue
        out |= _flat(each, f"{name}.") if isinstance(each, Mapping) else {name: each}
    return {key.replace("parallelism.modules.", "parallelism."): each for key, each in out.items()}


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
