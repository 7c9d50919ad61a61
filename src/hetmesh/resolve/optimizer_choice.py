"""Which optimizer a parameter has: of the first of `[[optimizer.param_groups]]` that matches, else of `[optimizer]`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hetmesh._own_code import import_named
from hetmesh.cost import ModuleShape
from hetmesh.cost.shapes import OptimizerNeeds, WeightShape
from hetmesh.cost.static_memory import OPTIMIZER_COPIES
from hetmesh.errors import RecipeError, Refusals
from hetmesh.formatting import counted, listed
from hetmesh.models.weights.fill_module import plain_name
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.section import freeze
from hetmesh.recipe.sections import Optimizer
from hetmesh.recipe.values import PLAIN_OPTIMIZERS
from hetmesh.resolve.optimizer_probe import OptimizerKind, optimizer_kind

SHARED = -1
"""The number of `[optimizer]` itself among its groups."""


def group_of(keys: Optimizer, parameter: str) -> int:
    """The number of the first of `param_groups` whose pattern finds something in the name of a parameter,
    `"llm.model.norm.weight"`; `SHARED` if none does."""
    found = (i for i, group in enumerate(keys.param_groups) if re.search(group.pattern, plain_name(parameter)))
    return next(found, SHARED)


class ChosenOptimizer(NamedTuple):
    """An optimizer of some parameters of a module."""

    where: str  # the key of its name, with the name
    made: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    kind: OptimizerKind | None = None  # of torch's AdamW, Adam and SGD without further arguments


def chosen_optimizer(recipe: Recipe, module: str, group: int) -> ChosenOptimizer:
    """The optimizer of the parameters of `module` that are in a group. Raises RecipeError: there is no such class, or
    it could not train them."""
    keys, own = recipe.optimizer, recipe.modules[module]
    name, more, where, options = keys.name, keys.options, "optimizer.name", "optimizer.options"
    if group != SHARED:
        name, more = keys.param_groups[group].optimizer_name, keys.param_groups[group].optimizer_kwargs
        where, options = (f"optimizer.param_groups[{group}].optimizer_{part}" for part in ("name", "kwargs"))
    where, plain = f"{where} = {name!r}", name in PLAIN_OPTIMIZERS
    made: type[torch.optim.Optimizer] = getattr(torch.optim, name) if plain else _imported(name, where, keys.folder)
    arguments: dict[str, Any] = {"lr": keys.lr if own.lr is None else own.lr}
    if "weight_decay" in inspect.signature(made).parameters:
        arguments["weight_decay"] = keys.weight_decay if own.weight_decay is None else own.weight_decay
    elif group == SHARED:
        for at, given in (("optimizer", keys), (f"modules.{module}", own)):
            if "weight_decay" in given.model_fields_set:
                raise RecipeError(f"{at}.weight_decay: {where} takes none; leave it out")
    if plain:
        # No kernel of a fused SGD takes DTensors (torch 2.13).
        kernel = "foreach" if (name, keys.implementation) == ("SGD", "fused") else keys.implementation
        adam = {} if name == "SGD" else {"betas": (keys.beta1, keys.beta2), "eps": keys.eps}
        arguments |= adam | {each: kernel == each for each in ("fused", "foreach")}
        if not more:
            return ChosenOptimizer(where, made, arguments)
    if group == SHARED and (twice := sorted(more.keys() & arguments.keys())):
        raise RecipeError(f"{options}.{twice[0]}: write it in [optimizer]")
    arguments |= more
    try:
        kind = optimizer_kind(made, freeze(arguments | {"lr": 0.0}))  # type: ignore[arg-type]  # a class has a hash
    except RecipeError as error:
        told = ", ".join(f"{key} = {value!r}" for key, value in arguments.items())
        raise RecipeError(f"{where} with {told}: {error}") from error
    return ChosenOptimizer(where, made, arguments, kind)


def optimizer_needs(recipe: Recipe, shape: ModuleShape, refusals: Refusals) -> dict[str, OptimizerNeeds]:
    """By parameter of a module what its optimizer makes of it, in a recipe with other optimizers than one of torch's
    AdamW, Adam and SGD. What would not be trained so is added to `refusals`."""
    keys = recipe.optimizer
    if not (keys.param_groups or keys.frozen_options or ":" in keys.name):
        return {}
    members: dict[tuple[int, int], list[WeightShape]] = {}  # by table and dims
    for weight in filter(lambda weight: weight.trainable, shape.weights):
        group = group_of(keys, f"{shape.name}.{weight.name}")
        members.setdefault((group, len(weight.shape)), []).append(weight)
    needs: dict[str, OptimizerNeeds] = {}
    moving = getattr(recipe.parallelism.modules.get(shape.name), "expert_placement_interval", 0)
    for (group, dims), weights in sorted(members.items()):
        with refusals.collect():
            chosen = chosen_optimizer(recipe, shape.name, group)
            if chosen.kind is None:
                found = OptimizerNeeds(OPTIMIZER_COPIES[chosen.made.__name__], whole=False)
            elif dims in chosen.kind.needs:
                found = chosen.kind.needs[dims]
            else:
                why = chosen.kind.why.get(dims, "it was tried on up to 5")
                names = listed([f"{shape.name}.{weight.name}" for weight in weights], 4)
                raise RecipeError(
                    f"{chosen.where} takes no parameters of {counted(dims, 'dim')} ({why}), as {names}; give them "
                    "another one in [[optimizer.param_groups]]"
                )
            needs |= {weight.name: found for weight in weights}
            if moving and found.whole and any(weight.expert for weight in weights):
                raise RecipeError(
                    f"parallelism.{shape.name}.expert_placement_interval = {moving}: {chosen.where} works on all of a "
                    "block's experts at once, so they cannot move; make it 0, or give them another optimizer"
                )
    return needs


def with_optimizer_needs(recipe: Recipe, shape: ModuleShape) -> ModuleShape:
    """`shape` with the `optimizer_needs` of its parameters."""
    needs = optimizer_needs(recipe, shape, Refusals())  # `check_recipe` says what is refused
    if not needs:
        return shape
    own = (tuple(replace(w, optimizer=needs.get(w.name)) for w in layer.weights) for layer in shape.layers)
    return replace(shape, layers=tuple(replace(layer, weights=w) for layer, w in zip(shape.layers, own, strict=True)))


def check_optimizers(recipe: Recipe, shapes: Mapping[str, ModuleShape | None], refusals: Refusals) -> None:
    """Refuse optimizers that could not train the parameters that they have, and tables that have none."""
    keys, known = recipe.optimizer, [shape for shape in shapes.values() if shape is not None]
    for shape in known:
        optimizer_needs(recipe, shape, refusals)
    names = [f"{shape.name}.{w.name}" for shape in known for w in shape.weights if w.trainable]
    if len(known) == len(shapes):
        for idle in sorted({*range(len(keys.param_groups))} - {group_of(keys, name) for name in names}):
            refusals.add(
                f"optimizer.param_groups[{idle}].pattern = {keys.param_groups[idle].pattern!r}: it matches the name of "
                f"no parameter that is trained and that no table before it has; there are {listed(names)}"
            )


def _imported(name: str, where: str, folder: str | None) -> type[torch.optim.Optimizer]:
    try:
        found = import_named(name, folder)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"{where}: cannot import it: {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise RecipeError(f"{where}: it is no subclass of torch.optim.Optimizer")
    return found
