"""Checks of what a Pipeline is given: parts whose parameters and layers can be trained, and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hetmesh.errors import GraphError
from hetmesh.models.module_shape import batch_dependence
from hetmesh.parallel import SharedSums

Parameters = tuple[tuple[str, str], ...]
"""Of a part on a rank: each parameter, with what of it is equal on all of them."""


def described_parameters(module: nn.Module, sums: SharedSums) -> Parameters:
    """What `check_equal_parameters` compares: names, whole shapes, dtypes, which are shared, and which are trained."""
    shared = {id(p) for parameters, _ in sums for p in parameters}
    return tuple(
        (
            name,
            f"{tuple(p.shape)} {p.dtype}{', shared with another part' * (id(p) in shared)}, "
            f"requires_grad = {p.requires_grad}",
        )
        for name, p in module.named_parameters()
    )


def check_equal_parameters(ranks: Sequence[Mapping[str, Parameters]]) -> None:
    """Raise GraphError unless all ranks that have a part have the same parameters in it: what is gathered and summed of
    them would not fit together. `ranks` has the parts of each."""
    first: dict[str, tuple[int, dict[str, str]]] = {}
    for rank, parts in enumerate(ranks):
        for part, given in parts.items():
            other, expected = first.setdefault(part, (rank, dict(given)))
            here = dict(given)
            for name in [*expected, *here]:
                if here.get(name) != expected.get(name):
                    raise GraphError(
                        f"part {part!r}: its parameters must be equal on all ranks: {name} is "
                        f"{here.get(name, 'missing')} on rank {rank}, and {expected.get(name, 'missing')} on {other}"
                    )
            if list(here) != list(expected):
                raise GraphError(f"part {part!r}: its parameters have another order on rank {rank} than on {other}")


def check_own_layers(name: str, module: nn.Module) -> None:
    """Raise GraphError if layers of a part depend on what a lane and microbatch happen to hold, while they train."""
    if reason := batch_dependence(module, "or put these layers into eval()", training_only=True):
        raise GraphError(f"part {name!r}: {reason}")


def checked_batch(part: str, samples: tuple[int, ...], given: Any) -> Mapping[str, Tensor]:
    """What `load` gave for some samples. Raises GraphError: it is no mapping, or a tensor of it has not a row per
    sample."""
    asked = f"load({part!r}, samples) of {len(samples)} samples"
    if not isinstance(given, Mapping):
        raise GraphError(f"{asked} must return tensors by name, {{}} for a part that reads nothing, got {given!r:.80}")
    for key, value in given.items():
        if isinstance(value, Tensor) and (value.ndim == 0 or len(value) != len(samples)):
            raise GraphError(f"{asked}: {key!r} must have a row per sample, got shape {tuple(value.shape)}")
    return given
