"""Which recipes have dropout, and which of those draw in their layout what one process draws."""

from __future__ import annotations

from torch.distributed.tensor.parallel import RowwiseParallel

from hetmesh.recipe.module_options import packs, splits_tokens
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.sections import Module
from hetmesh.resolve.resolved import resolve


def has_dropout(recipe: Recipe) -> bool:
    """Whether a module of `recipe` draws random numbers when it trains."""
    return any(_adapters_dropout(module) or _config_keys(module) for module in recipe.modules.values())


def draws_alike(recipe: Recipe) -> bool:
    """Whether a run of `recipe`, which has dropout, draws what `parity.reference(recipe, microbatches=True)` draws.

    So it is where every module has one lane, samples stay in the microbatches in which they were drawn, they are not
    packed, tokens are not shared between ranks, and tensor-parallel ranks drop only of values that they hold alike.
    """
    if recipe.balance.policy != "none" and recipe.batch.num_microbatches > 1:
        return False
    if any(recipe.wiring.lanes(name) > 1 or packs(recipe, name) for name in recipe.modules):
        return False
    return all(_module_draws_alike(recipe, name) for name in recipe.modules)


def _module_draws_alike(recipe: Recipe, name: str) -> bool:
    module, mesh = recipe.modules[name], recipe.wiring.meshes[name]
    keys, lora = _config_keys(module), module.lora if _adapters_dropout(module) else None
    if not keys and lora is None:
        return True
    if mesh.axis_size("cp") > 1 or splits_tokens(recipe, name):
        return False
    if mesh.axis_size("tp") == 1:
        return True
    if keys - {"dropout"}:
        return False
    if lora is None:
        return True
    plan = {**resolve(recipe).adapters[name].tensor_parallel_plan(), **module.plan}
    split = {k.split(".")[-1] for k, style in plan.items() if style == "rowwise" or isinstance(style, RowwiseParallel)}
    return lora.target_modules is not None and not split & set(lora.target_modules)


def _adapters_dropout(module: Module) -> bool:
    return module.lora is not None and module.lora.dropout > 0


def _config_keys(module: Module) -> set[str]:
    """Keys of dropout in a config: `dropout` is on hidden states, others on heads or the inputs of linear layers."""
    return {key for key, value in module.config.items() if key.endswith("dropout") and value}
