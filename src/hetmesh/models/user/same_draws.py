"""Random numbers that are the same for every element, so that a module in training can be compared with itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetmesh._torch_compat import TorchDispatchMode

_DRAWS = {"rand", "randn", "randint", "normal", "uniform", "exponential", "log_normal", "cauchy", "random", "geometric"}


class SameDraws(TorchDispatchMode):
    """While it is entered torch draws 0.5 everywhere, lets every random event happen (so dropout keeps all), and draws
    the reverse as a permutation: what is decided for each sample is then the same whatever is computed with it, and
    what mixes samples still mixes them. What is not drawn by torch stays random."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_").removesuffix("_like")
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **(kwargs or {}))
        if name == "randperm":
            return out.sort(descending=True).values
        if name == "bernoulli":
            return out.fill_(1)
        if name in _DRAWS and out.numel():
            out.fill_(0.5 if out.is_floating_point() else out.flatten()[0])
        return out
