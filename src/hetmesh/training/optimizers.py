"""Optimizer and learning-rate schedule of a rank: torchtitan's containers over the modules that live here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hetmesh import _titan
from hetmesh._torch_compat import whole_tensor
from hetmesh.models.weights.fill_module import copy_part, local_share
from hetmesh.parallel.apply import Root
from hetmesh.parallel.gradient_sums import local_gradient, local_part
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.sections import LRScheduler
from hetmesh.resolve.optimizer_choice import chosen_optimizer, group_of
from hetmesh.resolve.optimizer_probe import OptimizerKind


def make_optimizers(recipe: Recipe, root: Root) -> tuple[Any, Any] | None:
    """torchtitan's `OptimizersContainer` and `LRSchedulersContainer`; None on a rank without trainable parameters.

    Parameter groups per module and table of `[optimizer]`, with the module's own learning rate and weight decay where
    the recipe gives them: one of plain parameters and one per mesh that its DTensors lie on, since no fused kernel
    takes several at once. torch's AdamW, Adam and SGD are one optimizer each; a class that the recipe names is one per
    module and table, so that all arguments reach its constructor, and ranks that gather parameters do so in one order.
    """
    groups = []
    factories: dict[str, Callable[..., torch.optim.Optimizer]] = {}
    for name, module in root.named_children():
        members: dict[tuple[int, DeviceMesh | None], list[str]] = {}
        for key, p in module.named_parameters():
            if p.requires_grad:
                group = group_of(recipe.optimizer, fqn := f"{name}.{key}")
                members.setdefault((group, p.device_mesh if isinstance(p, DTensor) else None), []).append(fqn)
        for (group, _), names in sorted(members.items(), key=lambda member: member[0][0]):
            optimizer, arguments = chosen_optimizer(recipe, name, group), {}
            if optimizer.kind is None:
                factory, arguments = optimizer.made.__name__, dict(optimizer.arguments)
                factories[factory] = optimizer.made
            else:
                factory = f"{name}, {optimizer.where}"
                on_plain = type(optimizer.made.__name__, (_OnPlainTensors, optimizer.made), {"kind": optimizer.kind})
                factories[factory] = partial(on_plain, **optimizer.arguments)
            pattern = "|".join(f"^{re.escape(key)}$" for key in names)
            groups.append(
                _titan.param_group_config()(pattern=pattern, optimizer_name=factory, optimizer_kwargs=arguments)
            )
    if not groups:
        return None
    container = _titan.optimizers_container(factories)
    optimizers = container(container.Config(param_groups=groups), model_parts=[root])
    return optimizers, _schedulers(recipe.lr_scheduler, recipe.training.steps, optimizers)


class _OnPlainTensors(torch.optim.Optimizer):
    """A mixin whose step hands its class a plain tensor for each sharded parameter: this rank's shard, or the whole of
    it where the class does not update each element by itself.

    Ranks that gather a parameter compute the same update, and keep their shares of it and its state; one at a time.
    """

    kind: OptimizerKind

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. Collective over the mesh of those that are gathered."""
        groups = self.param_groups
        try:
            for group in groups:
                named = zip(group["params"], group["param_names"], strict=True)
                # `local_gradient` brings it into the parameter's placements
                given = [(p, name) for p, name in named if local_gradient(p) is not None]
                sharded = {p: name for p, name in given if not self._gathers(p)}
                for names in filter(None, (sharded, *({p: name} for p, name in given if self._gathers(p)))):
                    self._step(group, names)
        finally:
            self.param_groups = groups

    def _gathers(self, parameter: Tensor) -> bool:
        return isinstance(parameter, DTensor) and self.kind.needs[parameter.ndim].whole

    def _step(self, group: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> None:
        stand_ins = {p: nn.Parameter(self._plain(p, p)) for p in names}
        for parameter, plain in stand_ins.items():
            plain.grad = self._plain(parameter.grad, parameter)
            if parameter in self.state:
                state = self.state.pop(parameter).items()
                self.state[plain] = {k: self._plain(v, parameter) if isinstance(v, DTensor) else v for k, v in state}
        self.param_groups = [{**group, "params": [*stand_ins.values()], "param_names": [*names.values()]}]
        super().step()
        for parameter, plain in stand_ins.items():
            if self._gathers(parameter):
                _keep_share(parameter, plain)
            elif not plain.is_set_to(local := local_part(parameter)):  # after `p.data = ...`
                local.copy_(plain)
            if state := self.state.pop(plain, None):
                self.state[parameter] = {k: self._kept(v, parameter, plain) for k, v in state.items()}

    def _plain(self, tensor: Any, parameter: Tensor) -> Tensor:
        if not self._gathers(parameter):
            return local_part(tensor)
        return whole_tensor(tensor.detach().to(tensor.device_mesh.device_type))  # from the host, if it is offloaded

    def _kept(self, value: Any, parameter: Any, plain: Tensor) -> Any:
        """What is kept of a parameter's state: tensors of its shape sharded as it is, all else as it is."""
        alike = isinstance(value, Tensor) and value.ndim and value.shape == plain.shape
        if not alike or not isinstance(parameter, DTensor):
            return value
        if self._gathers(parameter):
            share = torch.empty_like(parameter.detach(), dtype=value.dtype)
            _keep_share(share, value)
            return share
        how: Any = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
        return DTensor.from_local(value, parameter.device_mesh, parameter.placements, **how)


def _keep_share(sharded: Tensor, whole: Tensor) -> None:
    local, regions = local_share(sharded.detach())
    copy_part(local, regions, whole.detach())


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
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    factor = _schedulers(recipe.lr_scheduler, recipe.training.steps, [optimizer]).schedulers[0].lr_lambdas[0]
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
