"""ModuleOptions: how a module runs on its mesh. Plain values, read alike by what runs it and by what predicts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Reshard = Literal["default", "always", "never"]
CheckpointMode = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ModuleOptions:
    """What may be asked of one module beyond its mesh. The defaults change nothing.

    Attributes:
        reshard_after_forward: of modules with a `dp_shard` axis: whether a layer's gathered parameters are let go after
            its forward and gathered again for its backward. `default`: those of blocks are, the root's (embeddings,
            final norm, head) are kept; `always`: both; `never`: neither.
        activation_checkpoint: what a block's backward computes again: nothing, all but matrix products and attention,
            or all of it.
        parameter_dtype: of the parameters, their gradients, the sums of those over ranks and the optimizer's state.
        compute_dtype: of the computation and of the rows that the module emits; None is `parameter_dtype`.
        sequence_parallel: whether activations between attention and MLP are split over `tp` along the tokens.
        cpu_offload: of modules with a `dp_shard` axis: whether shards, gradients and optimizer state live on the CPU.
        compile_backend: of torch.compile, for each block; None does not compile.
    """

    reshard_after_forward: Reshard = "default"
    activation_checkpoint: CheckpointMode = "none"
    parameter_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    sequence_parallel: bool = False
    cpu_offload: bool = False
    compile_backend: str | None = None

    @property
    def row_dtype(self) -> torch.dtype:
        """In what the module computes, and in what its rows and their gradients travel."""
        return self.compute_dtype or self.parameter_dtype


DEFAULT = ModuleOptions()
