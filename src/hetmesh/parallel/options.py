"""What a recipe may ask of one module beyond its mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Reshard = Literal["default", "always", "never"]
CheckpointMode = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Options:
    """How a module runs on its mesh. The defaults change nothing.

    Attributes:
        reshard_after_forward: of modules with a `dp_shard` axis: whether a layer's gathered parameters are let go after
            its forward and gathered again for its backward. `default`: those of blocks are, the root's (embeddings,
            final norm, head) are kept; `always`: both; `never`: neither.
        activation_checkpoint: what a block's backward computes again; see `apply_activation_checkpoint`.
        compute_dtype: of the computation and of the rows that the module emits; None is that of its parameters. The
            parameters, their gradients, their sums over ranks and the optimizer's state keep their own dtype.
        sequence_parallel: whether activations between attention and MLP are split over `tp` along the tokens.
        compile_backend: of torch.compile, for each block; None does not compile.
        cpu_offload: of modules with a `dp_shard` axis: whether shards, gradients and optimizer state live on the CPU.
    """

    reshard_after_forward: Reshard = "default"
    activation_checkpoint: CheckpointMode = "none"
    compute_dtype: torch.dtype | None = None
    sequence_parallel: bool = False
    cpu_offload: bool = False
    compile_backend: str | None = None
