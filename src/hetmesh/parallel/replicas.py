"""Whether replicas of parameters, and their gradients, are equal along every axis that copies them.

Replicas start equal and get equal gradients, so they differ only where something is wrong: random state that ranks do
not share, a gradient that was not summed, an operation that is not deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.errors import GradientError, ReplicaError
from hetmesh.parallel.apply import ParallelModule
from hetmesh.parallel.gradient_sums import local_gradient, local_part
from hetmesh.parallel.reduction import TiedParameter

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 14  # elements; small, as it takes memory beside all weights when a run starts
_NAMED = 8  # differing parameters that an error names
_GRADIENT_TOLERANCE = 1e-2  # of a gradient's norm: by how much replicas may differ
_CHECK = "check of replicas"


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
        buffers: compare these too, along all axes.

    Raises:
        ReplicaError: on all ranks, if any differ; names parameters, modules, ranks and the step.
    """

    def hashes(part: ParallelModule) -> dict[str, Tensor]:
        tensors = [(fqn, local_part(p)) for fqn, p in part.module.named_parameters()]
        return {fqn: _hash(tensor) for fqn, tensor in (*tensors, *(part.module.named_buffers() if buffers else ()))}

    wrong: list[str] = []
    for name, axis, names, group, table in _gathered_along_axes(modules, hashes, world, _CHECK):
        found = _differing(table, group)
        wrong += [f"{name}.{names[i]} (module {name!r}, {axis}: {text})" for i, text in found]
    for copy in sorted(tied, key=lambda copy: copy.name):
        found = _differing(_gathered([_hash(local_part(copy.parameter))], copy.group, world, _CHECK), copy.group)
        wrong += [f"{copy.name} (the copies of two pipeline stages: {text})" for _, text in found]
    if everything := union_over_ranks(wrong, world, _CHECK):
        when = f"debug.check_replicas: after step {step}" if step else "before the first step"
        hint = "" if step else ". Do ranks draw them from generators without a common seed?"
        more = f"; and {len(everything) - _NAMED} more" if len(everything) > _NAMED else ""
        shown = "; ".join(everything[:_NAMED])
        raise ReplicaError(f"{when} replicas of {len(everything)} parameters are not equal: {shown}{more}{hint}")


def check_replica_gradients(modules: Mapping[str, ParallelModule], world: World) -> None:
    """Compare the gradients of replicas of a parameter, by their norm and their sum. Collective over all ranks. Raises
    GradientError on all ranks if some differ by more than rounding: tensor parallelism has left some partial, say."""

    def summaries(part: ParallelModule) -> dict[str, Tensor]:
        return {fqn: _norm_and_sum(p) for fqn, p in part.module.named_parameters() if p.requires_grad}

    wrong: list[str] = []
    for name, axis, names, _, table in _gathered_along_axes(modules, summaries, world, "comparison of gradients"):
        off = (table - table[0]).abs().amax((0, 2)) > _GRADIENT_TOLERANCE * table[..., 0].amax(0)
        wrong += [f"{name}.{names[i]} (along {axis})" for i in off.nonzero().flatten().tolist()]
    if everything := union_over_ranks(wrong, world, "comparison of gradients"):
        raise GradientError(
            f"ranks that hold the same parameter have different gradients of it: {', '.join(everything[:_NAMED])}"
            f"{' and more' if len(everything) > _NAMED else ''}; what each rank computed of it must be summed over "
            "that axis, or be the same on all of its ranks (in a tensor_parallel_plan: replicated_with_grad_allreduce)"
        )


def union_over_ranks(texts: Sequence[str], world: World, what: str) -> list[str]:
    """All `texts` of any rank, each once; the same on all ranks. Collective over all ranks of the job. `what`: the name
    of this collective, for errors about ranks that wait."""
    with world.waiting(what):
        count = torch.tensor([len(texts)], device=world.device)
        dist.all_reduce(count, group=world.group(range(world.size)))
        found = gather_objects(list(texts), world) if count.item() else []
    return list(dict.fromkeys(text for of_rank in found for text in of_rank))


def _gathered_along_axes(
    modules: Mapping[str, ParallelModule],
    summaries: Callable[[ParallelModule], Mapping[str, Tensor]],
    world: World,
    what: str,
) -> Iterator[tuple[str, str, list[str], dist.ProcessGroup, Tensor]]:
    """For each module and axis that copies some of its tensors: both names, the names of these tensors, the group, and
    the summaries of its ranks `[ranks, names, numbers]`."""
    for name, part in modules.items():
        found = summaries(part)
        for axis in part.spec.axes:
            names = [fqn for fqn in found if fqn not in part.axes or axis not in part.axes[fqn].sharded]
            if names and part.spec.axis_size(axis) > 1:
                group = part.device_mesh.get_group(axis)
                yield name, axis, names, group, _gathered([found[fqn] for fqn in names], group, world, what)


def _gathered(summaries: Sequence[Tensor], group: dist.ProcessGroup, world: World, what: str) -> Tensor:
    local = torch.stack([summary.to(world.device) for summary in summaries])
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    with world.waiting(what):
        dist.all_gather(gathered, local, group=group)
    return torch.stack(gathered).cpu()


def _norm_and_sum(parameter: nn.Parameter) -> Tensor:
    """Norm of a gradient, and its sum over the root of its size, which is no larger."""
    gradient = local_gradient(parameter)
    if gradient is None or not gradient.numel():
        return torch.zeros(2, dtype=torch.float64)
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return torch.stack([norm, gradient.sum(dtype=torch.float64) / gradient.numel() ** 0.5]).cpu()


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


def _differing(table: Tensor, group: dist.ProcessGroup) -> list[tuple[int, str]]:
    """Index of each hash that is not the same on all ranks of `group`, and which ranks differ from which."""
    ranks = dist.get_process_group_ranks(group)
    out = []
    for i in (table != table[0]).any(0).any(-1).nonzero().flatten().tolist():
        equal = [rank for rank, row in zip(ranks, table[:, i], strict=True) if torch.equal(row, table[0, i])]
        out.append((i, f"ranks {[rank for rank in ranks if rank not in equal]} differ from ranks {equal}"))
    return out
