"""What a class of optimizers does, tried on small tensors: whether it updates each element by itself, so that shards of
a parameter may be updated; what it keeps; and what would go wrong in some layout or after a checkpoint."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetmesh.cost.shapes import OptimizerNeeds
from hetmesh.errors import RecipeError
from hetmesh.recipe.section import FrozenDict, thaw

_SHAPES = ((), (4352,), (160, 144), (2, 160, 144), (4, 6, 16, 20), (4, 3, 4, 10, 12))
"""By number of dims, up to those of a convolution over three: of above 4096 elements, below which optimizers of 8 bits
keep 32, and matrices of above 128 rows and columns, below which Adafactor of optax keeps a number for each element."""

_SCALES = (1.0, 1e-3, 1e3, 1.0)  # of the gradient in each step: what clips by a norm does so in one of them
_LR = 1e-2  # whatever the recipe's is: a rate of 0 would show nothing


class OptimizerKind(NamedTuple):
    """What a class does with some arguments."""

    needs: Mapping[int, OptimizerNeeds]  # by number of dims of a parameter, up to 5: what it makes of one
    why: Mapping[int, str]  # it does not take others


@lru_cache(maxsize=64)
def optimizer_kind(made: type[torch.optim.Optimizer], arguments: FrozenDict) -> OptimizerKind:
    """Try `made(groups, **arguments)`. Raises RecipeError, without a key: it takes no such arguments or no parameters,
    or would not train alike in every layout and after a checkpoint."""
    make = partial(made, **(thaw(arguments) | {"lr": _LR}))
    needs, why = dict[int, OptimizerNeeds](), dict[int, str]()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        for dims, shape in enumerate(_SHAPES):
            try:
                (expected,), optimizer = _run(make, _draw(shape))
            except Exception as error:
                why[dims] = f"{type(error).__name__}: {error}"
                continue
            try:
                _check(make, shape, expected)
            except Exception as error:  # of the class: it does not expect parameters without a gradient, say
                known = isinstance(error, RecipeError)
                raise error if known else RecipeError(f"{type(error).__name__}: {error}") from error
            kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.ndim]
            like = [x for x in kept if x.shape == expected.shape]
            needs[dims] = OptimizerNeeds(len(like), whole=len(like) < len(kept) or not _takes_parts(make, expected))
    if not needs:
        raise RecipeError(why[2])
    return OptimizerKind(needs, why)


Make = Callable[..., torch.optim.Optimizer]
Before = Callable[[torch.optim.Optimizer, int], torch.optim.Optimizer]
"""What comes before a step: an optimizer and the number of the step -> the optimizer that takes it."""


def _draw(shape: Sequence[int], seed: int = 0) -> list[Tensor]:
    """A parameter, and its gradient in each step."""
    random = torch.Generator().manual_seed(seed)
    drawn = [scale * torch.randn(shape, generator=random, dtype=torch.float64) for scale in (1.0, *_SCALES)]
    for gradient in drawn[1:] if len(shape) else ():
        gradient[: shape[0] // 2] *= 30  # halves differ
    return drawn


def _begin(make: Make, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return make([{"params": list(parameters), "param_names": [f"{i}" for i, _ in enumerate(parameters)]}])


def _run(
    make: Make, *drawn: Sequence[Tensor | None], before: Before = lambda optimizer, _: optimizer
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Parameters after all steps, and their optimizer; `drawn`: of each its values and its gradients (`_draw`)."""
    optimizer = _begin(make, [nn.Parameter(values.clone()) for values, *_ in drawn if values is not None])
    for number, _ in enumerate(_SCALES):
        optimizer = before(optimizer, number)
        for parameter, (_, *gradients) in zip(_parameters(optimizer), drawn, strict=True):
            gradient = gradients[number]
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in _parameters(optimizer)], optimizer


def _check(make: Make, shape: Sequence[int], expected: Tensor) -> None:
    """Raise RecipeError if parameters of a shape could not be trained, of which one becomes `expected`."""
    drawn, other = _draw(shape), _draw(shape, 1)
    groups = _begin(make, [nn.Parameter(drawn[0])]).param_groups
    if [(len(group["params"]), group.get("param_names")) for group in groups] != [(1, ["0"])]:
        raise RecipeError("it makes other parameter groups than it is given, so no checkpoint would find its state")
    faster = _run(partial(make, lr=2 * _LR), drawn)[0]
    apart = [expected, drawn[0], *_run(make, other)[0]]
    torch.manual_seed(torch.initial_seed() + 1)
    if not _same(_run(make, drawn)[0], [expected]):
        raise RecipeError("it draws random numbers, which would be others on each rank")
    if not _same(_run(make, drawn, before=partial(_resume, make))[0], [expected]):
        raise RecipeError(
            "it does not go on from a checkpoint as it would have without: that holds tensors and numbers in the state "
            "of parameters which are there from the first step on, and no options of groups"
        )
    if not _same(_run(make, drawn, before=_exchange)[0], [expected]):
        raise RecipeError("it remembers parameters, which it should find in its groups in every step")
    if not _same(_run(make, drawn, before=_double)[0], faster):
        raise RecipeError("it does not read lr from its parameter groups, where a schedule sets it")
    if not _same(_run(make, drawn, [drawn[0], *[None] * len(_SCALES)], other)[0], apart):
        raise RecipeError(
            "what it does to a parameter depends on other parameters, which may be on other ranks, or it changes "
            "parameters without a gradient"
        )


def _takes_parts(make: Make, expected: Tensor) -> bool:
    """Whether parts of a parameter, as shards are, become those of `expected`."""
    drawn = _draw(expected.shape)
    try:
        for dim, size in enumerate(expected.shape):
            cuts = itertools.pairwise((0, size // 2, size, size))  # the last part is empty, as shards may be
            parts = [_run(make, [x.narrow(dim, a, b - a) for x in drawn])[0][0] for a, b in cuts]
            if not _same([torch.cat(parts, dim)], [expected]):
                return False
    except Exception:  # it does not take such a part
        return False
    return True


def _resume(make: Make, optimizer: torch.optim.Optimizer, number: int) -> torch.optim.Optimizer:
    """As a run does that goes on from a checkpoint, before the last step."""
    if number < len(_SCALES) - 1:
        return optimizer
    (parameter,), saved = _parameters(optimizer), copy.deepcopy(optimizer.state_dict())
    values, fresh = parameter.detach().clone(), _begin(make, [parameter])
    (group,) = fresh.param_groups
    parameter.grad, group["lr"] = torch.zeros_like(parameter), 0.0
    fresh.step()  # which makes its state (torchtitan's init_optim_state)
    options = {key: value for key, value in group.items() if key != "params"} | {"lr": _LR}
    there = fresh.state[parameter].keys()
    for state in saved["state"].values():
        for key in [k for k, v in state.items() if k not in there or not isinstance(v, Tensor | int | float | str)]:
            del state[key]
    fresh.load_state_dict(saved)
    fresh.param_groups[0].update(options)  # as `keeping_options` does
    parameter.data.copy_(values)
    return fresh


def _exchange(optimizer: torch.optim.Optimizer, _: int) -> torch.optim.Optimizer:
    """Let another tensor stand for the parameter, with what is kept of it."""
    (parameter,), other = _parameters(optimizer), nn.Parameter(_parameters(optimizer)[0].detach().clone())
    optimizer.param_groups[0]["params"] = [other]
    if parameter in optimizer.state:
        optimizer.state[other] = optimizer.state.pop(parameter)
    return optimizer


def _double(optimizer: torch.optim.Optimizer, _: int) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["lr"] = 2 * _LR
    return optimizer


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True) for a, b in pairs)
