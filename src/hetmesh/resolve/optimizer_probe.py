"""What a class of optimizers does, tried on small tensors: whether it updates each element by itself, so that shards of
a parameter may be updated; what it keeps; and what would go wrong in some layout or after a checkpoint."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from hetmesh.cost.shapes import OptimizerNeeds
from hetmesh.errors import RecipeError
from hetmesh.recipe.section import FrozenDict, thaw

_SHAPES = ((), (96,), (96, 80), (8, 24, 40), (4, 6, 16, 20), (4, 3, 4, 10, 12))
"""By number of dims, up to those of a convolution over three; matrices and more are of above 4096 elements, below which
optimizers of 8 bits keep 32."""

_SCALES = (1.0, 1e-3, 1e3, 1.0)  # of the gradient in each step: what clips by a norm does so in one of them
_LR = 1e-2  # whatever the recipe's is: a rate of 0 would show nothing


@dataclass(frozen=True)
class OptimizerKind:
    """What a class does with some arguments.

    Attributes:
        needs: by number of dims of a parameter, up to 5, what it makes of one; of those that it takes.
        why: why it does not take the others.
    """

    needs: Mapping[int, OptimizerNeeds]
    why: Mapping[int, str]


@lru_cache(maxsize=64)
def optimizer_kind(made: type[torch.optim.Optimizer], arguments: FrozenDict) -> OptimizerKind:
    """Try `made(groups, **arguments)`.

    Raises:
        RecipeError: it takes no such arguments or no parameters, or would not train alike in every layout and after a
            checkpoint; why, without a key.
    """
    probe = _Probe(partial(made, **(thaw(arguments) | {"lr": _LR})))
    needs, why = dict[int, OptimizerNeeds](), dict[int, str]()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        for dims, shape in enumerate(_SHAPES):
            trial = _Trial.of(shape)
            try:
                probe.run([trial])
            except Exception as error:
                why[dims] = f"{type(error).__name__}: {error}"
                continue
            try:
                probe.check(trial)
            except RecipeError:
                raise
            except Exception as error:  # of the class: it does not expect parameters without a gradient, say
                raise RecipeError(f"{type(error).__name__}: {error}") from error
            needs[dims] = probe.needs(trial)
    if not needs:
        raise RecipeError(why[2])
    return OptimizerKind(needs, why)


@dataclass(frozen=True)
class _Trial:
    """A parameter, and its gradient in each step."""

    values: Tensor
    gradients: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, shape: Sequence[int], seed: int = 0) -> _Trial:
        random = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, shape, generator=random, dtype=torch.float64)
        values, gradients = draw(), [scale * draw() for scale in _SCALES]
        for gradient in gradients if len(shape) else ():
            gradient[: shape[0] // 2] *= 30  # halves differ
        return cls(values, tuple(gradients))

    def part(self, dim: int, start: int, length: int) -> _Trial:
        cut = [tensor.narrow(dim, start, length) for tensor in (self.values, *self.gradients) if tensor is not None]
        return _Trial(cut[0], tuple(cut[1:]))


Exchange = Callable[[torch.optim.Optimizer, int], torch.optim.Optimizer]
"""What comes before a step: an optimizer and the number of the step -> the optimizer that takes it."""


@dataclass(frozen=True)
class _Probe:
    make: Callable[..., torch.optim.Optimizer]

    def begin(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        names = [f"{i}" for i, _ in enumerate(parameters)]
        return self.make([{"params": list(parameters), "param_names": names}])

    def run(
        self, trials: Sequence[_Trial], before: Exchange = lambda optimizer, _: optimizer
    ) -> tuple[list[Tensor], torch.optim.Optimizer]:
        """The parameters of `trials` after all steps, and their optimizer."""
        optimizer = self.begin([nn.Parameter(trial.values.clone()) for trial in trials])
        for number, _ in enumerate(_SCALES):
            optimizer = before(optimizer, number)
            for parameter, trial in zip(_parameters(optimizer), trials, strict=True):
                gradient = trial.gradients[number]
                parameter.grad = None if gradient is None else gradient.clone()
            optimizer.step()
        return [parameter.detach() for parameter in _parameters(optimizer)], optimizer

    def check(self, trial: _Trial) -> None:
        """Raise RecipeError if parameters like that of `trial` could not be trained."""
        fresh = self.begin([nn.Parameter(trial.values)])
        if [(len(group["params"]), group.get("param_names")) for group in fresh.param_groups] != [(1, ["0"])]:
            raise RecipeError(
                "it makes other parameter groups than it is given, with other names: a checkpoint would not find its "
                "state; tables of [[optimizer.param_groups]] divide parameters"
            )
        expected, optimizer = self.run([trial])
        torch.manual_seed(torch.initial_seed() + 1)
        if not _same(self.run([trial])[0], expected):
            raise RecipeError("it draws random numbers, which would be others on each rank")
        first, last = (dict(o.param_groups[0]) for o in (fresh, optimizer))
        if changed := [key for key in last if key != "params" and repr(first.get(key)) != repr(last[key])]:
            raise RecipeError(
                f"it keeps {', '.join(changed)} in its parameter groups, which a run that goes on sets as the recipe "
                "says; a checkpoint holds the state of parameters"
            )
        for key, value in next(iter(optimizer.state.values()), {}).items():
            if not isinstance(value, Tensor | int | float | str | None):
                raise RecipeError(
                    f"its state {key!r} is a {type(value).__name__}; checkpoints hold tensors and numbers"
                )
        if not _same(self.run([trial], self._resume)[0], expected):
            raise RecipeError("it does not go on from its state in a checkpoint as it would have without")
        if not _same(self.run([trial], _exchange)[0], expected):
            raise RecipeError("it remembers parameters, which it should find in its groups in every step")
        others = _Probe(partial(self.make, lr=2 * _LR)).run([trial])[0]
        if not _same(self.run([trial], _double)[0], others):
            raise RecipeError("it does not read lr from its parameter groups, where a schedule sets it")
        other, without = _Trial.of(trial.values.shape, 1), _Trial(trial.values, (None,) * len(_SCALES))
        apart = [*expected, trial.values, *self.run([other])[0]]
        if not _same(self.run([trial, without, other])[0], apart):
            raise RecipeError(
                "what it does to a parameter depends on other parameters, which may be on other ranks, or it changes "
                "parameters without a gradient"
            )

    def needs(self, trial: _Trial) -> OptimizerNeeds:
        """What it makes of a parameter like that of `trial`."""
        (expected,), optimizer = self.run([trial])
        shape, alone = expected.shape, True
        kept = [x for x in next(iter(optimizer.state.values()), {}).values() if isinstance(x, Tensor) and x.ndim]
        try:
            for dim, size in enumerate(shape):
                cuts = itertools.pairwise((0, size // 2, size, size))  # the last part is empty, as shards may be
                parts = [self.run([trial.part(dim, start, stop - start)])[0][0] for start, stop in cuts]
                alone = alone and _same([torch.cat(parts, dim)], [expected])
        except Exception:  # it does not take such a part
            alone = False
        like = [x for x in kept if x.shape == shape]
        return OptimizerNeeds(len(like), whole=not alone or len(like) < len(kept))

    def _resume(self, optimizer: torch.optim.Optimizer, number: int) -> torch.optim.Optimizer:
        """As a run does that goes on from a checkpoint, before the last step."""
        if number < len(_SCALES) - 1:
            return optimizer
        parameters, state = _parameters(optimizer), copy.deepcopy(optimizer.state_dict())
        values = [parameter.detach().clone() for parameter in parameters]
        fresh = self.begin(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in fresh.param_groups:
            group["lr"] = 0.0
        fresh.step()  # which makes its state (torchtitan's init_optim_state)
        for old, new in zip(parameters, _parameters(fresh), strict=True):
            if late := sorted(optimizer.state[old].keys() ^ fresh.state[new].keys()):
                raise RecipeError(
                    f"after its first step its state has not the keys of later ones ({', '.join(late)}), so a "
                    "checkpoint would not be read; make all of it in the first step"
                )
        fresh.load_state_dict(state)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)
        return fresh


def _exchange(optimizer: torch.optim.Optimizer, _: int) -> torch.optim.Optimizer:
    """Let other tensors stand for the parameters, with what is kept of them."""
    (group,) = optimizer.param_groups
    for i, parameter in enumerate(group["params"]):
        group["params"][i] = other = nn.Parameter(parameter.detach().clone())
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
