"""Whether a tensor parallel plan of one's own leaves a module what it is: its forward and its gradients, whole and on
emulated ranks.

Between a colwise and a rowwise linear each rank has a share of the features. What works on each feature or head by
itself is then the same; a norm, a softmax or a split over all of them is another one on each rank, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import NONE, Adapter
from hetmesh.models.build import build_empty
from hetmesh.models.user.adapters import UserAdapter
from hetmesh.models.user.apart_probe import Call, two_of_its_inputs
from hetmesh.parallel.emulated_ranks import Ranks, sharded_dims
from hetmesh.parallel.tensor_parallel import GRAD_ALLREDUCE, check_plan, style_name

SHORTENED = 20_000_000
"""Parameters above which only one of a ModuleList's equal members is kept."""

LARGEST = 200_000_000
"""Parameters that are left then, at most: with them it takes some seconds and 2 GB."""

_MOST_GRADIENTS = 1 << 20  # parameters of a tensor whose gradient is compared
_TOLERANCE = 1e-6  # users' norms often compute in fp32
_POOL = 1 << 20


def why_no_probe(adapter: Adapter, plan: Mapping[str, Any], degree: int, vocab_size: int, where: str) -> str | None:
    """Compare the module whole with itself on `degree` emulated ranks, in float64, on two samples, without dropout.

    Its weights are random: rows of large ones overlap in a small memory.

    Args:
        plan: FQN pattern -> style.
        where: the key of the plan, for errors.

    Returns:
        Why it could not be compared; None if it was.

    Raises:
        RecipeError: they differ.
    """
    calls = two_of_its_inputs(adapter, vocab_size)
    if calls is None:
        return "no input for it is known"
    try:
        builds = _Builds(adapter, plan)
    except _NotCompared as reason:
        return str(reason)
    with _one_thread():
        try:
            whole, again = builds.run(calls), builds.output(calls)
        except Exception as error:  # training says what is wrong with it, of what it really gets
            return f"its forward of random inputs failed: {type(error).__name__}: {error!s:.200}"
        if not torch.equal(whole.output, again):
            return "it is random without dropout too"
        told = f"{where}: on {degree} tensor parallel ranks {builds.kind}"
        try:
            ranks = builds.on_ranks(calls, degree)
        except Exception as error:
            raise RecipeError(
                f"{told} fails, and whole it does not: {type(error).__name__}: {error!s:.300}; does something between "
                "its colwise and rowwise linears count on all features?"
            ) from error
        _compare(whole, ranks, builds.styles, told)
    return None


class _NotCompared(Exception):
    """Why a module is not."""


@dataclass
class _Run:
    """One forward of the module, whole or of a rank."""

    output: Tensor
    leaves: dict[str, Tensor]
    """Inputs and parameters whose gradients are compared."""
    rowwise: dict[str, Tensor]
    """What its rowwise linears got, in the order of their calls."""
    gradients: dict[str, Tensor] = field(default_factory=dict)


class _Builds:
    """The module, built as often as it is needed, always with the same values.

    Raises:
        _NotCompared: it cannot be.
    """

    def __init__(self, adapter: Adapter, plan: Mapping[str, Any]) -> None:
        self.adapter: Any = adapter
        if isinstance(adapter, UserAdapter):  # whole, however many layers it has: no stages, no shares of tokens
            self.adapter = replace(adapter, layer_names=(), abilities=NONE)
        names = {pattern: style_name(style) for pattern, style in plan.items()}
        self.plan = {pattern: name for pattern, name in names.items() if name is not None}
        if strange := [pattern for pattern, name in names.items() if name is None]:
            raise _NotCompared(f"its plan has another ParallelStyle than torch's plain ones for {strange[0]!r}")
        self.short = False
        try:
            module, self.styles = self._empty()
        except RecipeError:
            raise
        except Exception as error:
            raise _NotCompared(f"it cannot be built without memory: {type(error).__name__}: {error!s:.200}") from error
        self.kind = type(module).__name__
        if _size(module) > SHORTENED:
            self.short = True
            module, self.styles = self._empty()
        if (size := _size(module)) > LARGEST:
            raise _NotCompared(f"its layers that differ have {size:,} parameters; at most {LARGEST:,} are compared")
        self.values = _values(module)

    def run(self, calls: Call) -> _Run:
        """A forward and a backward of the whole module."""
        run = self._forward(self._module(), calls)
        cotangent = _random_like(run.output)
        found = torch.autograd.grad([run.output], list(run.leaves.values()), [cotangent], allow_unused=True)
        run.gradients = _named(run.leaves, found)
        return run

    def output(self, calls: Call) -> Tensor:
        """What the whole module returns."""
        with torch.no_grad():
            return self._forward(self._module(), calls).output

    def on_ranks(self, calls: Call, degree: int) -> list[_Run]:
        """The same on `degree` emulated ranks."""
        ranks = Ranks(degree)
        modules = [self._module() for _ in range(degree)]
        for rank, module in enumerate(modules):
            ranks.shard(module, self.styles, rank)
        runs = ranks.run([partial(self._forward, module, calls) for module in modules])
        leaves = [leaf for run in runs for leaf in run.leaves.values()]
        outputs = [run.output for run in runs]
        found = torch.autograd.grad(outputs, leaves, [_random_like(out) for out in outputs], allow_unused=True)
        for at, run in enumerate(runs):
            run.gradients = _named(run.leaves, found[at * len(run.leaves) : (at + 1) * len(run.leaves)])
        return runs

    def _forward(self, module: nn.Module, calls: Call) -> _Run:
        rowwise: dict[str, Tensor] = {}
        for name, style in self.styles.items():
            if style == "rowwise":
                module.get_submodule(name).register_forward_pre_hook(partial(_note, rowwise, name))
        leaves: dict[str, Tensor] = {}
        batch, inputs = (_own_leaves(part, leaves) for part in calls)
        for name, parameter in module.named_parameters():
            if self.values[name].numel() <= _MOST_GRADIENTS:
                leaves[name] = parameter.requires_grad_()
        return _Run(self.adapter.forward(module, batch, inputs), leaves, rowwise)

    def _module(self) -> nn.Module:
        module, _ = self._empty()
        new = {id(p): nn.Parameter(self.values[name], False) for name, p in module.named_parameters()}
        for owner in module.modules():
            for key, own in owner._parameters.items():
                if own is not None:
                    owner._parameters[key] = new[id(own)]
        return module.eval()

    def _empty(self) -> tuple[nn.Module, dict[str, str]]:
        module = build_empty(self.adapter, torch.float64)
        found = check_plan(module, self.plan)
        styles = {module.get_submodule(name): s for pattern, s in self.plan.items() for name in found[pattern]}
        for parent in list(module.modules()) if self.short else ():
            for key, child in list(parent.named_children()):
                if isinstance(child, nn.ModuleList):
                    kept = set({_structure(each, styles): each for each in reversed(child)}.values())
                    setattr(parent, key, nn.ModuleList(each for each in child if each in kept))
        return module, {name: styles[each] for name, each in module.named_modules() if each in styles}


def _note(noted: dict[str, Tensor], name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
    noted.setdefault(name, given[0].detach())


def _own_leaves(tensors: Mapping[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    own = {key: each.clone().requires_grad_(each.is_floating_point()) for key, each in tensors.items()}
    leaves |= {f"its input {key!r}": each for key, each in own.items() if each.requires_grad}
    return own


def _named(leaves: Mapping[str, Tensor], gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
    given = zip(leaves.items(), gradients, strict=True)
    return {name: torch.zeros_like(leaf) if gradient is None else gradient for (name, leaf), gradient in given}


def _random_like(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(output.dtype)


def _compare(whole: _Run, ranks: Sequence[_Run], styles: Mapping[str, str], told: str) -> None:
    for name, features in whole.rowwise.items():
        shares = [run.rowwise[name] for run in ranks]
        joined = torch.cat(shares, -1)
        if joined.shape != features.shape or _distance(joined, features) > _TOLERANCE:
            by = "" if joined.shape != features.shape else f" by {_distance(joined, features):.2g}"
            raise RecipeError(
                f"{told} computes something else than whole: what rowwise {name!r} gets differs{by}. Between colwise "
                "and rowwise linears each rank has a share of the features: does a norm, a softmax, a mean or a split "
                "take all of them there? Leave these linears out of the plan, or work on each head or feature by itself"
            )
    for run in ranks:
        if (off := _distance(run.output, whole.output)) > _TOLERANCE:
            raise RecipeError(f"{told} computes something else than whole: its output differs by {off:.2g}")
    everything = torch.stack([gradient.norm() for gradient in whole.gradients.values()]).norm()
    for name, gradient in whole.gradients.items():
        owner, _, key = name.rpartition(".")
        style = next((s for at, s in styles.items() if f"{owner}.".startswith(f"{at}.")), "")
        each = [run.gradients[name] for run in ranks]
        hint = "what is behind it works on shares of features: in the plan it needs replicated_with_grad_allreduce"
        if style == GRAD_ALLREDUCE:
            each = [torch.stack(each).sum(0)]
            hint = "it works on what every rank has in full: leave it out of the plan"
        elif key in sharded_dims(style):
            each = [torch.cat(each, sharded_dims(style)[key])]
        off = max(_distance(one, gradient, 1e-3 * everything) for one in each)
        if off > _TOLERANCE:
            raise RecipeError(f"{told} has another gradient of {name}, which differs by {off:.2g}: {hint}")


def _distance(found: Tensor, expected: Tensor, least: Tensor | float = 0.0) -> float:
    """Relative; 0 where both are 0."""
    size = max(float(expected.detach().norm()), float(least))
    off = float((found - expected).detach().norm())
    return off / size if size else off


def _structure(module: nn.Module, styles: Mapping[nn.Module, str]) -> tuple[Any, ...]:
    """What makes layers equal, but for their numbers."""
    return tuple(
        (
            name,
            type(each),
            styles.get(each),
            tuple((key, None if p is None else tuple(p.shape)) for key, p in each._parameters.items()),
            tuple((key, v) for key, v in vars(each).items() if isinstance(v, str | bool | float)),
        )
        for name, each in module.named_modules()
    )


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _values(module: nn.Module) -> dict[str, Tensor]:
    """Random values: matrices that keep the size of what they are applied to, vectors around 1."""
    generator = torch.Generator().manual_seed(0)
    pools: dict[int, Tensor] = {}
    values = {}
    for name, parameter in module.named_parameters():
        rows, last = parameter.shape[:-1].numel(), parameter.shape[-1] if parameter.ndim else 1
        if parameter.ndim < 2:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            values[name] = 1 + noise / 2
        elif parameter.numel() <= _POOL:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            values[name] = noise / parameter[0].numel() ** 0.5
        else:
            length = max(_POOL, rows) + last
            if length not in pools:
                pools[length] = torch.randn(length, generator=generator, dtype=torch.float64) / last**0.5
            step = (length - last) // rows
            values[name] = pools[length].as_strided((rows, last), (step, 1)).unflatten(0, parameter.shape[:-1])
    return values


@contextmanager
def _one_thread() -> Iterator[None]:
    """Libraries start no threads: the process may yet fork workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
