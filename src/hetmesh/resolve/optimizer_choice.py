"""Which optimizer a parameter has: of the first of `[[optimizer.param_groups]]` that matches, else of `[optimizer]`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

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
from hetmesh.resolve.optimizer_probe import OptimizerKind, optimizer_kind

SHARED = -1
"""The number of `[optimizer]` itself among its groups."""

_ADAM = ("lr", "weight_decay", "betas", "eps")
_TAKEN: Mapping[str, Sequence[str]] = {"AdamW": _ADAM, "Adam": _ADAM, "SGD": ("lr", "weight_decay")}


def group_of(keys: Optimizer, parameter: str) -> int:
    """The number of the first of `param_groups` whose pattern finds something in the name of a parameter,
    `"llm.model.norm.weight"`; `SHARED` if none does."""
    found = (i for i, group in enumerate(keys.param_groups) if re.search(group.pattern, plain_name(parameter)))
    return next(found, SHARED)


@dataclass(frozen=True)
class ChosenOptimizer:
    """An optimizer of some parameters of a module.

    Attributes:
        where: the key of its name, with the name.
        made: its class.
        arguments: its keyword arguments.
        kind: what the class does; None of torch's AdamW, Adam and SGD.
    """

    where: str
    made: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    kind: OptimizerKind | None = None

    def refused(self, dims: int, names: Sequence[str]) -> str:
        """Why it trains none of the parameters `names`, which have so many dims; empty if it does."""
        if self.kind is None or dims in self.kind.needs:
            return ""
        why = self.kind.why.get(dims, "it was tried on up to 5")
        return (
            f"{self.where} takes no parameters of {counted(dims, 'dim')} ({why}), as {listed(names, 4)}; give them "
            "another one in [[optimizer.param_groups]]"
        )


def chosen_optimizer(recipe: Recipe, module: str, group: int) -> ChosenOptimizer:
    """The optimizer of the parameters of `module` that are in a group. Raises RecipeError: there is no such class, or
    it could not train them."""
    keys, own = recipe.optimizer, recipe.modules[module]
    name, more, table = keys.name, keys.options, "optimizer"
    where, options = f"{table}.name", f"{table}.options"
    if group != SHARED:
        name, more = keys.param_groups[group].optimizer_name, keys.param_groups[group].optimizer_kwargs
        where, options = (f"{table}.param_groups[{group}].optimizer_{part}" for part in ("name", "kwargs"))
    where = f"{where} = {name!r}"
    shared: dict[str, Any] = {
        "lr": keys.lr if own.lr is None else own.lr,
        "weight_decay": keys.weight_decay if own.weight_decay is None else own.weight_decay,
    }
    made: type[torch.optim.Optimizer] = (
        getattr(torch.optim, name) if name in _TAKEN else _imported(name, where, keys.folder)
    )
    taken: Collection[str] = _TAKEN[name] if name in _TAKEN else inspect.signature(made).parameters
    if group == SHARED:
        given = {"optimizer": keys, f"modules.{module}": own}
        idle = [f"{at}.weight_decay" for at, each in given.items() if "weight_decay" in each.model_fields_set]
        if idle and "weight_decay" not in taken:
            raise RecipeError(f"{idle[0]}: {where} takes none; leave it out")
    if name in _TAKEN:
        if wrong := sorted(more.keys() - (set(taken) if group != SHARED else set())):
            raise RecipeError(
                f"{options}.{wrong[0]}: {where} has what keys of [optimizer] give it; for other arguments write "
                f"'torch.optim:{name}'"
            )
        # No kernel of a fused SGD takes DTensors (torch 2.13).
        kernel = "foreach" if (name, keys.implementation) == ("SGD", "fused") else keys.implementation
        adam = {} if name == "SGD" else {"betas": (keys.beta1, keys.beta2), "eps": keys.eps}
        kernels = {"fused": kernel == "fused", "foreach": kernel == "foreach"}
        arguments = shared | adam | more | kernels
        try:
            made([nn.Parameter(torch.zeros(1))], **arguments)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{options}: {error}") from error
        return ChosenOptimizer(where, made, arguments)
    if group == SHARED and "lr" in more:
        raise RecipeError(f"{options}.lr: write it in [optimizer]")
    arguments = {key: value for key, value in shared.items() if key == "lr" or key in taken} | more
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
    members: dict[int, list[WeightShape]] = {}
    for weight in shape.weights:
        if weight.trainable:
            members.setdefault(group_of(keys, f"{shape.name}.{weight.name}"), []).append(weight)
    needs: dict[str, OptimizerNeeds] = {}
    table = recipe.parallelism.modules.get(shape.name)
    for group, weights in members.items():
        with refusals.collect():
            chosen = chosen_optimizer(recipe, shape.name, group)
            if chosen.kind is None:
                plain = OptimizerNeeds(OPTIMIZER_COPIES[chosen.made.__name__], whole=False)
                needs |= {weight.name: plain for weight in weights}
                continue
            kind = chosen.kind
            for dims in sorted({len(weight.shape) for weight in weights}):
                names = [f"{shape.name}.{weight.name}" for weight in weights if len(weight.shape) == dims]
                if refused := chosen.refused(dims, names):
                    refusals.add(refused)
            found = {w.name: kind.needs[len(w.shape)] for w in weights if len(w.shape) in kind.needs}
            needs |= found
            moving = 0 if table is None else table.expert_placement_interval
            if moving and any(w.expert and w.name in found and found[w.name].whole for w in weights):
                refusals.add(
                    f"parallelism.{shape.name}.expert_placement_interval = {moving}: {chosen.where} works on all of a "
                    "block's experts at once, so they cannot move; make it 0, or give them another optimizer"
                )
    return needs


def with_optimizer_needs(recipe: Recipe, shape: ModuleShape) -> ModuleShape:
    """`shape` with the `optimizer_needs` of its parameters."""
    needs = optimizer_needs(recipe, shape, Refusals())  # `check_recipe` says what is refused
    if not needs:
        return shape
    layers = (
        replace(layer, weights=tuple(replace(w, optimizer=needs.get(w.name)) for w in layer.weights))
        for layer in shape.layers
    )
    return replace(shape, layers=tuple(layers))


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
