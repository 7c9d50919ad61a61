"""The StepModel of a recipe: the sizes of its modules, its machine, and a CPU's peak where the machine has none."""

from __future__ import annotations

import timeit
from dataclasses import replace

import torch

from hetmesh.cost import Machine, Profile, load_machine
from hetmesh.cost.machine import TYPICAL_PEAK
from hetmesh.errors import RecipeError
from hetmesh.graph import ModuleGraph
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.modules import Shapes
from hetmesh.simulate import StepModel


def agreed_step_model(
    recipe: Recipe, graph: ModuleGraph, shapes: Shapes, machine_name: str | None = None
) -> StepModel | None:
    """A model that is the same in every process of a job, since nothing is measured: a CPU has a typical peak. None
    where the sizes of a module are not known. `machine_name`: a name or TOML file; None: `[metrics] machine`, else a
    CPU. Raises RecipeError: the machine or the profile of the recipe cannot be read."""
    machine = load_machine(machine_name or recipe.metrics.machine or "cpu")
    kinds = {str(module.options.row_dtype).removeprefix("torch.") for module in graph.modules}
    missing = {kind: TYPICAL_PEAK for kind in sorted(kinds) if machine.peak(kind) is None}
    machine = replace(machine, peak_flops={**machine.peak_flops, **missing})
    profile = Profile.load(recipe.profiling.profile) if recipe.profiling.profile else None
    if None in shapes.values():
        return None
    return recipe_step_model(recipe, graph, shapes, machine, profile)


_SMALLEST, _LARGEST = 64, 1024  # of the square matrix product that stands for a CPU's peak
_MIN_PRODUCT_S = 0.01


def recipe_step_model(
    recipe: Recipe, graph: ModuleGraph, shapes: Shapes, machine: Machine | None = None, profile: Profile | None = None
) -> StepModel:
    """What predicts the steps of `recipe`.

    Args:
        machine: default: that of `[metrics] machine`, else a CPU, whose missing peaks are measured here.
        profile: its fitted seconds take the place of the analytic ones for every layer.

    Raises:
        RecipeError: a module cannot be built on the meta device, so its sizes are not known, or the machine is unknown.
    """
    machine = machine or load_machine(recipe.metrics.machine or "cpu")
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    if unknown := [name for name in shapes if name not in known]:
        raise RecipeError(f"modules.{unknown[0]}: its costs are not known, since it cannot be built on the meta device")
    if profile is None and machine.name == "cpu":
        used = {module.options.row_dtype for module in graph.modules}
        kinds = {str(dtype).removeprefix("torch."): dtype for dtype in sorted(used, key=str)}
        missing = {kind: measure_peak(dtype) for kind, dtype in kinds.items() if machine.peak(kind) is None}
        machine = replace(machine, peak_flops={**machine.peak_flops, **missing})
    decays = [recipe.optimizer.weight_decay, *(own.weight_decay for own in recipe.modules.values())]
    return StepModel(
        graph,
        known,
        machine,
        profile=profile,
        optimizer=recipe.optimizer.name,
        implementation=recipe.optimizer.implementation,
        weight_decay=any(decays),
    )


def measure_peak(dtype: torch.dtype) -> float:
    """FLOP/s of this process in a square matrix product: the best of three, large enough to take milliseconds."""
    size, seconds = _SMALLEST, 0.0
    while size < _LARGEST and seconds < _MIN_PRODUCT_S:  # a CPU without bfloat16 units is 50 times slower in it
        size *= 2
        a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        torch.mm(a[:32], b)  # starts threads and loads kernels
        seconds = min(timeit.repeat(lambda: torch.mm(a, b), number=1, repeat=3))  # noqa: B023 - called at once
    return 2 * size**3 / seconds
