"""A first recipe for a Hugging Face directory: its tables, and the search that chose the layout (`hetmesh init`).

What no file says (batch size, steps, learning rate) are usual values of full fine-tuning; sizes follow the data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import tomlkit
import torch

from hetmesh.cost import Machine, find_machine, load_machine
from hetmesh.data.drawn import DrawnBatch
from hetmesh.data.find_conversations import Conversations
from hetmesh.errors import RecipeError, SampleError
from hetmesh.planner import Found, Problem, search
from hetmesh.recipe.hf_path import positions_of, synthetic_options
from hetmesh.recipe.overrides import apply_override, parse_overrides
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.records.metrics import amount
from hetmesh.resolve.planning import planned_text, recipe_problem
from hetmesh.resolve.resolved import ResolvedRecipe, resolve
from hetmesh.resolve.summary import count_parameters

MAX_SAMPLES = 1024
"""Samples that say how long samples are."""

MAX_RANKS = 1024
"""Of a search for the least number of ranks that hold a model."""

STATE_BYTES = 16  # of a parameter that is trained: itself, its gradient and Adam's two moments in float32
LONGEST = 131_072  # tokens of a sample, while it is not known how long samples are
BATCH = 32
TRIED_STEPS = 100  # with random data
MANY_SAMPLES = 10_000  # of which one pass is enough


@dataclass(frozen=True)
class Starter:
    """A first recipe.

    Attributes:
        tables: the recipe, as TOML has it.
        samples, looked_at: in the data, and those that say how samples are.
        longest: tokens of the longest of them, media expanded.
        without_target, unreadable: how many of them add nothing to the loss, and how many cannot be read.
        problem, found: the search for its layout.
        tried: numbers of ranks that do not hold it.
    """

    tables: Mapping[str, Any]
    samples: int
    looked_at: int
    longest: int
    without_target: int
    unreadable: int
    problem: Problem
    found: Found
    tried: tuple[int, ...] = ()


def starter(
    directory: str,
    data: Conversations | None,
    *,
    machine: str | None = None,
    ranks: int | None = None,
    overrides: Sequence[str] = (),
) -> Starter:
    """Look at the directory's JSON files and the data, and search the layout.

    Args:
        data: None: random tokens and images of the model's sizes.
        machine: a name or TOML file; None: this one.
        ranks: None: the GPUs of this machine, or one on a CPU; of another machine as few as hold the model.
        overrides: as on the command line of other verbs; they hold, and are written.

    Raises:
        RecipeError: what `hetmesh check` would say of the directory or the data; no number of ranks holds the model.
    """
    device = _machine(machine)
    gpu = device.name != "cpu"
    tables = _draft(directory, data, gpu, machine)
    resolved, drawn = _measured(tables, overrides)
    samples, metas, unreadable = len(resolved.source), drawn.metas, len(drawn.unreadable)
    longest, without = int(metas.tokens.max()), int((metas.num_targets == 0).sum()) - unreadable
    power_of_two = max(1 << max(longest - 1, 0).bit_length(), 16)
    tables["training"]["seq_len"] = min(power_of_two, positions_of(directory) or LONGEST)
    if ranks is None and machine is None:
        ranks = max(torch.cuda.device_count(), 1)
    tried: list[int] = []
    for count in _powers(_least_ranks(resolved, device)) if ranks is None else (ranks,):
        tables["training"] |= _steps(samples, count, TRIED_STEPS if data is None else None)
        text = _dumped(tables, overrides)
        recipe = parse_recipe(text)
        name = machine or (device.name if gpu else None)
        problem = recipe_problem(resolve(recipe), machine=name, ranks=count)
        found = search(problem, shown=1)
        if found.fastest is not None:
            planned = planned_text(recipe, text, (), problem, found.fastest.plan)
            seen = samples, len(metas), longest, without, unreadable
            return Starter(tomli.loads(planned), *seen, problem, found, tuple(tried))
        tried.append(count)
        least = found.least_bytes
    raise RecipeError(
        f"no layout on {' or '.join(map(str, tried))} ranks of {device.name} holds the model"
        + (
            f": the smallest that was simulated holds {amount(least)}B on a rank, which has {amount(problem.limit)}B"
            if least
            else ""
        )
        + "; give more --ranks, or train less of it: --modules.vision.trainable false"
    )


def _machine(name: str | None) -> Machine:
    if name is not None:
        return load_machine(name)
    if not torch.cuda.is_available():
        return load_machine("cpu")
    device = torch.cuda.get_device_name()
    found = find_machine(device)
    if found is None:
        raise RecipeError(
            f"--machine: this one has {device!r}, of which no rates are known; give a name or a TOML file"
        )
    return found


def _draft(directory: str, data: Conversations | None, gpu: bool, machine: str | None) -> dict[str, Any]:
    """The tables without a layout. Samples may be of any length, and come one at a time."""
    name = _name(directory)
    tables: dict[str, Any] = {
        "job": {"description": f"{name}: fine-tuning", "dump_folder": f"./outputs/{name}"},
        "model": {"hf_path": directory},
        "modules": {},
        "parallelism": {},
        "data": {},
        "training": {
            "local_batch_size": 1,
            "global_batch_size": 1,
            "steps": 1,
            "seq_len": LONGEST,
            "max_norm": 1.0,
            "mixed_precision_param": "bfloat16" if gpu else "float32",
        },
        "optimizer": {"name": "AdamW", "lr": 2e-5, "weight_decay": 0.0},
        "lr_scheduler": {"warmup_steps": 0, "decay_type": "cosine"},
        "checkpoint": {"enable": True, "interval": 500},
        "metrics": {"log_freq": 10},
    }
    if machine is not None:
        tables["metrics"]["machine"] = machine
    if data is None:
        tables["data"] = {"source": "synthetic", "options": synthetic_options(directory)}
        return tables
    options = {"path": data.path}
    if data.media_folder:
        options["media_folder"] = data.media_folder
    if data.validation_path:
        options["validation_path"] = data.validation_path
        tables["validation"] = {"freq": 100}
    tables["data"] = {
        "num_workers": 4 if gpu else 0,
        "on_bad_sample": "stop",
        "on_no_target": "count",
        "options": options,
    }
    return tables


def _name(directory: str) -> str:
    """What the model is called: its folder, or of a snapshot in the cache of Hugging Face's hub its repository."""
    path = Path(os.path.abspath(Path(directory).expanduser()))
    return path.parents[1].name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name


def _dumped(tables: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The tables as TOML, with the overrides in them."""
    raw = {section: table for section, table in tables.items() if table}
    given = list(parse_overrides(overrides))
    modules: dict[str, Any] = {path[1]: {} for path, _ in given if path[0] == "modules" and len(path) > 1}
    raw = {**raw, "modules": modules} if modules else raw
    for path, value in given:
        raw = apply_override(raw, path, value)
    return tomlkit.dumps(raw)


def _measured(tables: Mapping[str, Any], overrides: Sequence[str]) -> tuple[ResolvedRecipe, DrawnBatch]:
    """The recipe, and samples from all of its data."""
    try:
        resolved = resolve(parse_recipe(_dumped(tables, overrides)))
        samples = len(resolved.source)
        drawn = resolved.loader().drawn(list(range(0, samples, max(samples // MAX_SAMPLES, 1)))[:MAX_SAMPLES])
    except SampleError as error:
        raise RecipeError(str(error)) from error
    metas = drawn.metas
    if len(drawn.unreadable) == len(metas):
        raise RecipeError(
            f"none of {len(metas)} samples of the data that were looked at can be read: {drawn.unreadable[0]}"
        )
    if not metas.num_targets.any():
        raise RecipeError(
            f"none of {len(metas)} samples of the data that were looked at has a target: nothing in them is the "
            "assistant's (`role` assistant, `from` gpt), or the chat template leaves it out"
        )
    return resolved, drawn


def _steps(samples: int, ranks: int, steps: int | None) -> dict[str, int]:
    """Samples per step, and steps for one pass through many samples or three through few."""
    batch = ranks * max(min(BATCH, samples) // ranks, 1)
    passes = 1 if samples >= MANY_SAMPLES else 3
    return {"global_batch_size": batch, "steps": steps or math.ceil(passes * samples / batch)}


def _least_ranks(resolved: ResolvedRecipe, machine: Machine) -> int:
    """How many hold at least the state of the parameters."""
    counts = {name: count_parameters(adapter) or 0 for name, adapter in resolved.adapters.items()}
    trained = {name: 1 if resolved.recipe.modules[name].trainable else 0.25 for name in counts}
    size = STATE_BYTES * sum(counts[name] * trained[name] for name in counts)
    limit = 0.9 * machine.memory_bytes
    return math.ceil(size / limit) if limit else 1


def _powers(least: int) -> tuple[int, ...]:
    first = 1 << max(least - 1, 0).bit_length()
    return tuple(first << i for i in range(4) if first << i <= MAX_RANKS) or (first,)
