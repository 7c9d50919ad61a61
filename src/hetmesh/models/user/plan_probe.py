"""Whether a user's tensor parallel plan leaves a module what it is: its outputs and gradients, whole and on ranks.

Between a colwise and a rowwise linear each rank has a share of the features. What works on each feature or head by
itself is then the same; a norm, a softmax or a split over all of them is another one on each rank, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hetmesh._processes import one_torch_thread
from hetmesh.errors import RecipeError
from hetmesh.models.adapter import NONE, Adapter
from hetmesh.models.user.adapters import UserAdapter, UserLlm
from hetmesh.models.user.probe import (
    MAX_PARAMETERS,
    Call,
    NotProbed,
    distance,
    gradient_floor,
    n_parameters,
    not_probed_if_it_fails,
    run,
    sample_calls,
)
from hetmesh.models.weights.build import build_empty
from hetmesh.parallel.linear import ColwiseLinear, RowwiseLinear
from hetmesh.parallel.tensor_parallel import GRAD_ALLREDUCE, check_plan, style_name

_MAX_DISTINCT = 200_000_000  # parameters without equal layers: with them a comparison takes some seconds and 2 GB
_MAX_GRADIENT = 1 << 20  # elements of a parameter whose gradient is compared
_POOL = 1 << 20  # elements of a parameter beyond which its rows overlap in memory
_TOLERANCE = 1e-6  # users' norms often compute in fp32


def reason_not_compared(
    adapter: Adapter, plan: Mapping[str, Any], degree: int, vocab_size: int, where: str
) -> str | None:
    """Compare the module whole with itself on `degree` ranks, in float64, on several samples, without dropout. `where`:
    the key of the plan, for errors. Returns why it could not be compared; None if it was."""
    if not isinstance(adapter, UserAdapter) or (isinstance(adapter, UserLlm) and vocab_size < 2):
        return "no input for it is known"
    call, _ = sample_calls(adapter, vocab_size)
    try:
        with one_torch_thread():
            _compare(_Copies(adapter, plan), call, degree, where)
    except NotProbed as reason:
        return str(reason)
    return None


class _Rank:
    """One tensor parallel rank of a module; the whole module is the only one.

    Ranks run one after the other. What a rank would get from the others is taken from the run of the whole module, so
    that what differs is found where it arises.

    Attributes:
        features: the names of rowwise linears and what they got, in the order of their calls.
        sums: what ranks would sum, or gather, after linears; in the order of their calls.
        entered: number and name of each call of a colwise linear -> the gradient of what it got, which ranks would sum.
    """

    def __init__(self, whole: _Rank | None = None, rank: int = 0, degree: int = 1) -> None:
        self.whole, self.rank, self.degree = whole, rank, degree
        self.features: list[tuple[str, Tensor]] = []
        self.sums: list[Tensor] = []
        self.entered: dict[tuple[int, str], Tensor] = {}
        self.n_entered = 0

    def run(self, copies: _Copies, call: Call) -> _Rank:
        """Forward and backward of a copy of the module with this rank's share of the weights."""
        module = copies.copy()
        for name, style in copies.styles.items():
            self._shard(name, module.get_submodule(name), style)
        self.names = {name for name, _ in module.named_parameters()}
        found = run(module, copies.adapter.forward, call)
        self.output, self.gradients = found.output, found.parameters
        return self

    def _shard(self, name: str, linear: Any, style: str) -> None:
        for key, dim in _sharded_dims(style).items():
            if self.whole is not None and (full := linear._parameters[key]) is not None:
                chunks = full.detach().chunk(self.degree, dim)
                share = chunks[self.rank] if self.rank < len(chunks) else full.detach().narrow(dim, 0, 0)
                linear._parameters[key] = nn.Parameter(share, full.requires_grad)
        if style == "rowwise":
            linear.__class__, linear.leave = RowwiseLinear, self._sum
            linear.register_forward_pre_hook(lambda _, given: self.features.append((name, given[0].detach())))
        elif style != GRAD_ALLREDUCE:
            linear.__class__, linear.enter, linear.widths = ColwiseLinear, partial(self._enter, name), None
        if style == "colwise_gather_output":
            start = self.rank * -(-linear.out_features // self.degree)
            linear.register_forward_hook(
                lambda _, __, out: self._sum(pad(out, (start, linear.out_features - start - out.shape[-1])))
            )

    def _sum(self, summand: Tensor) -> Tensor:
        self.sums.append(summand.detach())
        return summand if self.whole is None else summand + (self.whole.sums[len(self.sums) - 1] - summand).detach()

    def _enter(self, name: str, x: Tensor) -> Tensor:
        entered, at = x.view_as(x), (self.n_entered, name)
        self.n_entered += 1

        def summed(gradient: Tensor) -> Tensor:
            self.entered[at] = gradient
            return gradient if self.whole is None else self.whole.entered.get(at, gradient)

        if entered.requires_grad:
            entered.register_hook(summed)
        return entered


def _compare(copies: _Copies, call: Call, degree: int, where: str) -> None:
    with not_probed_if_it_fails("its forward of random inputs"):
        whole, again = (_Rank().run(copies, call) for _ in range(2))
    if not torch.equal(whole.output, again.output):
        raise NotProbed("it is random without dropout too")
    on_ranks = f"{where}: on {degree} tensor parallel ranks {copies.kind}"
    try:
        ranks = [_Rank(whole, rank, degree).run(copies, call) for rank in range(degree)]
        if any(len(rank.features) != len(whole.features) for rank in ranks):
            raise ValueError("it calls its rowwise linears another number of times")
    except Exception as error:
        raise RecipeError(
            f"{on_ranks} fails, and whole it does not: {type(error).__name__}: {error!s:.300}; does something between "
            "its colwise and rowwise linears depend on the number of features?"
        ) from error
    if untied := sorted(ranks[0].names - whole.names):
        raise RecipeError(
            f"{on_ranks} splits {untied}, which are tied to other parameters: untie them, or "
            "leave their linears out of the plan"
        )
    for (name, expected), *shares in zip(whole.features, *(rank.features for rank in ranks), strict=True):
        off = distance(torch.cat([share for _, share in shares], -1), expected)
        if not off <= _TOLERANCE:
            raise RecipeError(
                f"{on_ranks} computes something else than whole: what rowwise {name!r} gets differs by {off:.2g}. "
                "Between colwise and rowwise linears each rank has a share of the features: does a norm, a softmax, a "
                "mean or a split take all of them there? Leave these linears out of the plan, or work on each head or "
                "feature by itself"
            )
    off = max(distance(rank.output, whole.output) for rank in ranks)
    if not off <= _TOLERANCE:
        raise RecipeError(f"{on_ranks} computes something else than whole: its output differs by {off:.2g}")
    floor = gradient_floor(whole.gradients)
    for name, gradient, found, hint in _gradients(whole, ranks, copies.styles):
        off = max(distance(other, gradient, floor) for other in found)
        if not off <= _TOLERANCE:
            raise RecipeError(f"{on_ranks} has another gradient of {name}, which differs by {off:.2g}: {hint}")


def _gradients(
    whole: _Rank, ranks: Sequence[_Rank], styles: Mapping[str, str]
) -> Iterator[tuple[str, Tensor, list[Tensor], str]]:
    """Of what, the gradient of the whole module, those of ranks that must be equal to it, and why one may not be."""
    missing = "what follows works on shares of features: in the plan it needs replicated_with_grad_allreduce"
    for name, gradient in whole.gradients.items():
        owner, _, key = name.rpartition(".")
        style = next((s for at, s in styles.items() if f"{owner}.".startswith(f"{at}.")), "")
        found, hint = [rank.gradients[name] for rank in ranks], missing
        if style == GRAD_ALLREDUCE:
            found, hint = [torch.stack(found).sum(0)], "every rank has its input in full: leave it out of the plan"
        elif key in _sharded_dims(style):
            found = [torch.cat(found, _sharded_dims(style)[key])]
        yield name, gradient, found, hint
    for at, gradient in whole.entered.items():
        summed = torch.stack([rank.entered.get(at, torch.zeros_like(gradient)) for rank in ranks]).sum(0)
        yield f"the input of {at[1]}", gradient, [summed], missing


def _sharded_dims(style: str) -> dict[str, int]:
    """Parameters of a linear of `style` (empty: not in the plan) -> the dim that ranks share."""
    dims = {"rowwise": {"weight": 1}, GRAD_ALLREDUCE: {}, "": {}}
    return dims.get(style, {"weight": 0, "bias": 0})


class _Copies:
    """Copies of a module with the same random values: rows of large weights overlap in a small memory."""

    def __init__(self, adapter: UserAdapter, plan: Mapping[str, Any]) -> None:
        self.adapter = replace(adapter, layer_names=(), abilities=NONE)  # no stages, no shares of tokens
        names = {pattern: style_name(style) for pattern, style in plan.items()}
        self.plan = {pattern: name for pattern, name in names.items() if name is not None}
        if strange := [pattern for pattern, name in names.items() if name is None]:
            raise NotProbed(f"its plan has another ParallelStyle than torch's plain ones for {strange[0]!r}")
        self.short = False
        with not_probed_if_it_fails("building it without memory"):
            module, self.styles = self._empty()
        self.kind = type(module).__name__
        if n_parameters(module) > MAX_PARAMETERS:
            self.short = True
            module, self.styles = self._empty()
        if (size := n_parameters(module)) > _MAX_DISTINCT:
            raise NotProbed(f"its layers that differ have {size:,} parameters; at most {_MAX_DISTINCT:,} are compared")
        self.values = _values(module)

    def copy(self) -> nn.Module:
        """Another one, in evaluation mode."""
        module, _ = self._empty()
        new = {
            id(p): nn.Parameter(self.values[name], p.numel() <= _MAX_GRADIENT) for name, p in module.named_parameters()
        }
        for owner in module.modules():
            owner._parameters.update({key: new[id(p)] for key, p in owner._parameters.items() if p is not None})
        return module.eval()

    def _empty(self) -> tuple[nn.Module, dict[str, str]]:
        """The module without values, and the style of each submodule in the plan."""
        module = build_empty(self.adapter, torch.float64)
        found = check_plan(module, self.plan)
        styles = {module.get_submodule(name): s for pattern, s in self.plan.items() for name in found[pattern]}
        for parent in list(module.modules()) if self.short else ():
            for key, child in list(parent.named_children()):
                if isinstance(child, nn.ModuleList):  # of equal members the first is kept
                    kept = set({_structure(member, styles): member for member in reversed(child)}.values())
                    setattr(parent, key, nn.ModuleList(member for member in child if member in kept))
        return module, {name: styles[part] for name, part in module.named_modules() if part in styles}


def _structure(module: nn.Module, styles: Mapping[nn.Module, str]) -> tuple[Any, ...]:
    """What makes layers equal, but for their numbers."""
    return tuple(
        (
            name,
            type(part),
            styles.get(part),
            tuple((key, None if p is None else tuple(p.shape)) for key, p in part._parameters.items()),
            tuple((key, value) for key, value in vars(part).items() if isinstance(value, str | bool | float)),
        )
        for name, part in module.named_modules()
    )


def _values(module: nn.Module) -> dict[str, Tensor]:
    """Random values: matrices that keep the size of what they are applied to, vectors around 1."""
    generator = torch.Generator().manual_seed(0)
    pools: dict[int, Tensor] = {}
    values = {}
    for name, parameter in module.named_parameters():
        rows, last = parameter.shape[:-1].numel(), parameter.shape[-1] if parameter.ndim else 1
        if parameter.ndim < 2:
            values[name] = 1 + torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
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
