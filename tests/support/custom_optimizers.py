"""Optimizers as users write them, and some that could not be right in every layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


class SignMomentum(Optimizer):
    """Each element moves by the sign of its momentum (Lion), softened so that rounding errors stay small. `power` is
    kept by the object, not by its groups; parameters get new tensors."""

    def __init__(self, params, lr: float, weight_decay: float = 0.0, power: float = 1.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.power = power

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group["lr"], group["weight_decay"])

    @torch.no_grad()
    def update(self, p: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(gradient)
        p.mul_(1 - lr * weight_decay)
        p.data = p - lr * torch.tanh(momentum).abs().pow(self.power) * momentum.sign()


class RowNorms(SignMomentum):
    """Each row moves by its direction: a shard of columns does not show that. It keeps a number for each row, and
    replaces it in every step. Some layers, which their names say, move further than others."""

    def step(self, closure=None):
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    self.update(p, p.grad, group["lr"] * (2 if "layers.1." in name else 1), group["weight_decay"])

    def update(self, p: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        rows = p.shape[:1]
        norms = gradient.flatten(1).norm(dim=1) if p.ndim > 1 else gradient.abs()
        with torch.no_grad():
            self.state[p]["norms"] = norms = 0.5 * self.state[p].get("norms", torch.zeros(rows)) + norms
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
            p[...] -= lr * gradient / (0.1 + norms.view(-1, *[1] * (p.ndim - 1)))  # which no DTensors have


class RowsOfLarge(RowNorms):
    """Each row of a large matrix, and a large vector, moves by its direction; all else element by element."""

    def update(self, p: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        rows = p.ndim > 1 and min(p.shape[-2:]) >= 128
        if p.ndim == 1 and p.numel() > 4096:
            gradient = gradient / (0.1 + gradient.norm())
        (RowNorms if rows else SignMomentum).update(self, p, gradient, lr, weight_decay)


class FlatState(SignMomentum):
    """Updates each element by itself, and keeps one row of numbers: a part of it is no shard of the parameter."""

    def update(self, p: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        momentum = self.state[p].setdefault("momentum", torch.zeros(p.numel(), dtype=p.dtype))
        with torch.no_grad():
            p -= lr * torch.tanh(momentum.mul_(0.9).add_(gradient.flatten())).view_as(p)


class Noisy(SignMomentum):
    """Draws random numbers."""

    def update(self, p, gradient, lr, weight_decay):
        super().update(p, gradient + torch.randn_like(p), lr, weight_decay)


class Together(SignMomentum):
    """Clips by the norm over all of its parameters."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = torch.stack([g.norm() for g in gradients]).norm()
        super().step()

    def update(self, p, gradient, lr, weight_decay):
        super().update(p, gradient / self.norm, lr, weight_decay)


class Decays(SignMomentum):
    """Shrinks all parameters, also those without a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        super().step()


class CountsInGroups(SignMomentum):
    """Keeps its steps in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()

    def update(self, p, gradient, lr, weight_decay):
        super().update(p, gradient, lr / self.param_groups[0]["steps"], weight_decay)


class CountsByItself(SignMomentum):
    """Keeps its steps as an attribute."""

    steps = 0

    def update(self, p, gradient, lr, weight_decay):
        self.steps += 1
        super().update(p, gradient, lr / self.steps, weight_decay)


class Remembers(SignMomentum):
    """Updates the parameters that it was made with."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.all = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        (group,) = self.param_groups
        for p in self.all:
            if p.grad is not None:
                self.update(p, p.grad, group["lr"], 0.0)


class FixedRate(SignMomentum):
    """Reads its rate from where no schedule sets it."""

    def update(self, p, gradient, lr, weight_decay):
        super().update(p, gradient, self.defaults["lr"], weight_decay)


class History(SignMomentum):
    """Keeps a list of tensors."""

    def update(self, p, gradient, lr, weight_decay):
        history = self.state[p].setdefault("history", [])
        history.append(gradient.clone())
        super().update(p, torch.stack(history).mean(0), lr, weight_decay)


class Late(SignMomentum):
    """Has more state from its third step on."""

    def update(self, p, gradient, lr, weight_decay):
        state = self.state[p]
        state["count"] = state.get("count", 0) + 1
        if state["count"] > 2:
            state["average"] = state.get("average", 0) + gradient.clone()
        super().update(p, state.get("average", gradient), lr, weight_decay)


class OneGroup(SignMomentum):
    """Puts the parameters of all groups into one."""

    def __init__(self, params, **options):
        super().__init__([p for group in params for p in group["params"]], **options)


class AllHaveGradients(SignMomentum):
    """Does not expect that a parameter has no gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, group["lr"], group["weight_decay"])


class NoRate(Optimizer):
    """Has no learning rate."""

    def __init__(self, params, weight_decay: float = 0.0):
        super().__init__(params, {})


NO_CLASS = 1.0
