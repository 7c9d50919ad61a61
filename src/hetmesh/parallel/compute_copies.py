"""Computation with bf16 copies of fp32 parameters, in modules that FSDP does not shard.

Megatron-LM keeps parameters in bf16 and fp32 copies for the optimizer. Here, as with FSDP, a parameter is in fp32
between steps, where optimizers, checkpoints and comparisons of replicas find it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hetmesh._torch_compat import exchange_data
from hetmesh.parallel.gradient_sums import local_part


class ComputeCopies:
    """While a step runs, the trained parameters of a module have the values of their copies in `dtype`.

    Autograd adds up each microbatch's gradient in the parameter's own dtype. The copies keep their memory.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype, self.left = module, dtype, 0
        self._copies: dict[nn.Parameter, Tensor] = {}
        self._kept: dict[nn.Parameter, Tensor] = {}

    def begin(self, actions: int) -> None:
        """A step begins in which a stage of the module has that many actions on this rank."""
        self.left += actions
        if self.left and not self._kept:
            self._enter()

    @contextmanager
    def action(self, weights: bool = False) -> Iterator[None]:
        """The body is the next of them, all alike."""
        self.left -= 1
        yield
        if not self.left:
            self.abandon()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The body is a forward, of a step or of none."""
        alone = not self._kept
        if alone:
            self._enter()
        try:
            yield
        finally:
            if alone:
                self.abandon()

    def abandon(self) -> None:
        """The step is over, or ended in the middle."""
        self.left = 0
        for parameter, values in self._kept.items():
            exchange_data(parameter, values)
        self._kept = {}

    def free(self) -> None:
        """Let go of the copies' memory, between steps."""
        self._copies.clear()

    @torch.no_grad()
    def _enter(self) -> None:
        trained = [p for p in self.module.parameters() if casts_to(p, self.dtype) and p.requires_grad]
        self._kept = {p: p.data for p in trained}
        for parameter in trained:
            if parameter not in self._copies:
                parameter.grad_dtype = parameter.dtype
                self._copies[parameter] = torch.empty_like(parameter.data, dtype=self.dtype)
        copies = [self._copies[p] for p in trained]
        if trained:
            torch._foreach_copy_([local_part(copy) for copy in copies], [local_part(p) for p in trained])
        for parameter, copy in zip(trained, copies, strict=True):
            exchange_data(parameter, copy)


def cast_parameters(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Bring them to the dtype in which their module computes, in place."""
    for parameter in parameters:
        if casts_to(parameter, dtype):
            parameter.data = parameter.data.to(dtype)


def casts_to(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether a module that computes in `dtype` casts a parameter: scalars stay as they are, as with FSDP."""
    return parameter.ndim > 0 and parameter.is_floating_point() and parameter.dtype != dtype
