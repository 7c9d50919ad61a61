"""Optimizer and learning-rate schedule of a rank: torchtitan's containers over the modules that live here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hetmesh import _titan
from hetmesh.parallel.apply import Root
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.sections import LRScheduler, Module, Optimizer


def make_optimizers(recipe: Recipe, root: Root) -> tuple[Any, Any] | None:
    """torchtitan's `OptimizersContainer` and `LRSchedulersContainer`; None on a rank without trainable parameters.

    Parameter groups per module, with the module's own learning rate and weight decay where the recipe gives them:
    one of plain parameters and one per mesh that its DTensors lie on, since no fused kernel takes several at once.
    """
    groups = []
    for name, module in root.named_children():
        by_mesh: dict[DeviceMesh | None, list[str]] = {}
        for key, p in module.named_parameters():
            if p.requires_grad:
                by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(f"{name}.{key}")
        for names in by_mesh.values():
            pattern = "|".join(f"^{re.escape(key)}$" for key in names)
            groups.append(
                _titan.param_group_config()(
                    pattern=pattern,
                    optimizer_name=recipe.optimizer.name,
                    optimizer_kwargs=_arguments(recipe.modules[name], recipe.optimizer),
                )
            )
    if not groups:
        return None
    container = _titan.optimizers_container()
    config = container.Config(param_groups=groups, implementation=recipe.optimizer.implementation)
    optimizers = container(config, model_parts=[root])
    return optimizers, _schedulers(recipe.lr_scheduler, recipe.training.steps, optimizers)


def take_step(optimizers: Any, schedules: Any, update: bool = True) -> None:
    """One step of the schedule and, unless `update` is false, of the optimizer."""
    if update:
        optimizers.step()
        schedules.step()
        return
    with warnings.catch_warnings():  # torch takes a schedule that is ahead of its optimizer for a mistake
        warnings.simplefilter("ignore", UserWarning)
        schedules.step()


@contextmanager
def keeping_options(optimizers: tuple[Any, Any] | None) -> Iterator[None]:
    """Let the recipe's learning rates, weight decay and other options stand whatever the body loads.

    An optimizer's saved state holds its options too; only moments and step counts are to come from there. Learning
    rates are those of the step that the schedule has loaded.
    """
    if optimizers is None:
        yield
        return
    own = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers[0]]
    yield
    for optimizer, groups, schedule in zip(optimizers[0], own, optimizers[1], strict=True):
        for group, options, lr in zip(optimizer.param_groups, groups, schedule.get_last_lr(), strict=True):
            group.update(options | {"lr": lr})


def learning_rate(recipe: Recipe) -> Callable[[int], float]:
    """`[optimizer] lr` of the step that comes after so many; the same on every rank, with something to train or not."""
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    factor = _schedulers(recipe.lr_scheduler, recipe.training.steps, [stand_in]).schedulers[0].lr_lambdas[0]
    return lambda step: recipe.optimizer.lr * factor(step)


def _schedulers(keys: LRScheduler, steps: int, optimizers: Any) -> Any:
    steps = keys.total_steps or steps
    schedule = _titan.lr_schedulers_container().Config(
        warmup_steps=min(keys.warmup_steps, steps),
        decay_ratio=keys.decay_ratio,
        decay_type=keys.decay_type,
        min_lr_factor=keys.min_lr_factor,
    )
    return schedule.build(optimizers=optimizers, training_steps=steps)


def _arguments(own: Module, shared: Optimizer) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "lr": shared.lr if own.lr is None else own.lr,
        "weight_decay": shared.weight_decay if own.weight_decay is None else own.weight_decay,
    }
    if shared.name == "SGD":  # whose fused kernel does not take DTensors (torch 2.13)
        arguments |= {"fused": False, "foreach": shared.implementation != "for-loop"}
    else:
        arguments |= {"betas": (shared.beta1, shared.beta2), "eps": shared.eps}
    return arguments
