"""Whether replicas of parameters are still equal: sums of their bits, compared along every axis that copies them.

Replicas start equal and get equal gradients, so they differ only where something is wrong: random state that ranks do
not share, a gradient that was not summed, an operation that is not deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary import World
from hetmesh.errors import ReplicaError
from hetmesh.parallel.apply import ParallelModule
from hetmesh.parallel.gradients import local_part
from hetmesh.parallel.tied import TiedParameter

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 14  # elements; small, as it is held beside all weights when a run starts
_NAMED = 8  # differing parameters that an error names


def check_replicas(
    modules: Mapping[str, ParallelModule],
    tied: Sequence[TiedParameter],
    world: World,
    step: int,
    *,
    buffers: bool = False,
) -> None:
    """Compare all replicas of all parameters, bit by bit as far as 64-bit sums can tell.

    Collective over all ranks of the job: one small gather per module and axis, and one sum over all ranks.

    Args:
        modules: those of this rank, in the order of the graph.
        tied: parameters of which another pipeline stage holds a copy.
        step: steps taken so far; in the message.
        buffers: compare these too, along all axes.

    Raises:
        ReplicaError: on all ranks, if any differ; names parameters, modules, ranks and the step.
    """
    wrong: list[str] = []
    for name, each in modules.items():
        hashes = {fqn: _hash(local_part(p)) for fqn, p in each.module.named_parameters()}
        hashes |= {fqn: _hash(b) for fqn, b in each.module.named_buffers()} if buffers else {}
        for axis in each.spec.axes:
            compared = [fqn for fqn in hashes if fqn not in each.axes or axis not in each.axes[fqn].sharded]
            if compared and each.spec.axis_size(axis) > 1:
                group = each.device_mesh.get_group(axis)
                found = _differing([hashes[fqn] for fqn in compared], group, world)
                wrong += [f"{name}.{compared[i]} (module {name!r}, {axis}: {text})" for i, text in found]
    for copy in sorted(tied, key=lambda copy: copy.name):
        found = _differing([_hash(local_part(copy.parameter))], copy.group, world)
        wrong += [f"{copy.name} (the copies of two pipeline stages: {text})" for _, text in found]
    count = torch.tensor([len(wrong)], device=world.device)
    everybody = world.group(range(world.size))
    with world.waiting("check of replicas"):
        dist.all_reduce(count, group=everybody)
    if count.item():
        raise ReplicaError(_message(wrong, world, step))


def _hash(part: Tensor) -> Tensor:
    """Two 64-bit sums of the bits of a tensor, the second weighted by position. Order of summation does not matter."""
    bits = part.detach().contiguous().view(-1).view(_INTEGERS[part.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=part.device)
    weights = torch.arange(1, min(len(bits), _CHUNK) + 1, device=part.device) * 0x9E3779B1
    for i, chunk in enumerate(bits.split(_CHUNK)):
        values = chunk.to(torch.int64)
        total = values.sum()
        sums += torch.stack([total, (values * weights[: len(values)]).sum() + i * total])
    return sums


def _differing(hashes: list[Tensor], group: dist.ProcessGroup, world: World) -> list[tuple[int, str]]:
    """Index of each hash that is not the same on all ranks of `group`, and which ranks have which."""
    own = torch.stack([h.to(world.device) for h in hashes])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with world.waiting("check of replicas"):
        dist.all_gather(gathered, own, group=group)
    table = torch.stack(gathered).cpu()
    ranks = dist.get_process_group_ranks(group)
    out = []
    for i in (table != table[0]).any(0).any(-1).nonzero().flatten().tolist():
        equal = [rank for rank, row in zip(ranks, table[:, i], strict=True) if torch.equal(row, table[0, i])]
        out.append((i, f"ranks {[rank for rank in ranks if rank not in equal]} differ from ranks {equal}"))
    return out


def _message(wrong: list[str], world: World, step: int) -> str:
    """The same text on all ranks, from what each has found."""
    found: list[list[str] | None] = [None] * world.size
    with world.waiting("check of replicas"):
        dist.all_gather_object(found, wrong, group=world.group(range(world.size)))
    everything = list(dict.fromkeys(text for each in found for text in each or ()))
    more = f"; and {len(everything) - _NAMED} more" if len(everything) > _NAMED else ""
    when = f"debug.check_replicas: after step {step}" if step else "before the first step"
    hint = "" if step else ". Do ranks draw them from generators without a common seed?"
    return (
        f"{when} replicas of {len(everything)} parameters are not equal: {'; '.join(everything[:_NAMED])}{more}{hint}"
    )
