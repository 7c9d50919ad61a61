"""Parameters that the first and the last pipeline stage both hold, each a copy: a head tied to the embedding.

Both copies start alike, get the sum of both gradients, and so stay alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hetmesh.boundary import World
from hetmesh.graph import ModuleSpec, Stage
from hetmesh.parallel.apply import ParallelModule
from hetmesh.parallel.gradient_sums import local_gradient, local_part, set_local_gradient


@dataclass(frozen=True, eq=False)
class TiedParameter:
    """A parameter of this rank and who holds the other copy.

    Attributes:
        name: its FQN, with the module's name in front.
        group: the two ranks that hold the same shard.
        first: whether this rank's is the copy that counts in norms.
    """

    name: str
    parameter: nn.Parameter
    group: dist.ProcessGroup
    first: bool


def tied_parameters(
    spec: ModuleSpec, stages: Sequence[Stage], parallel: ParallelModule, groups: Mapping[int, dist.ProcessGroup]
) -> list[TiedParameter]:
    """The tied parameters of this rank, by name; none where both stages live on it.

    Args:
        stages: those of the module that this rank holds.
        groups: per rank of the first and last stage, the pair's group.
    """
    rank = dist.get_rank()
    if rank not in groups:
        return []
    kept = {layer for stage in stages for layer in spec.stage_layers(stage.index)}
    last = stages[-1].index == spec.num_stages - 1
    shared = []
    for name, parameter in parallel.module.named_parameters():
        layer = next((layer for layer in spec.layers if name.startswith(f"{layer}.")), None)
        if last and layer is not None and layer not in kept:  # a layer that this rank keeps brought it along
            shared.append((name, parameter, False))
        elif stages[0].index == 0 and name in parallel.tied:
            shared.append((name, parameter, True))
    return [
        TiedParameter(f"{spec.name}.{name}", p, groups[rank], first) for name, p, first in shared if p.requires_grad
    ]


def sum_tied_parameters(copies: Sequence[TiedParameter], world: World) -> None:
    """Give both copies the sum of their gradients. Called when the gradients are summed over lanes."""
    for copy in sorted(copies, key=lambda copy: copy.name):
        gradient = local_gradient(copy.parameter)
        total = torch.zeros_like(local_part(copy.parameter)) if gradient is None else gradient.clone()
        with world.waiting(f"gradient of {copy.name}, which two pipeline stages hold"):
            dist.all_reduce(total, group=copy.group)
        set_local_gradient(copy.parameter, total)
