"""Tensor parallelism over more ranks than an attention has heads of keys and values.

Ranks in a row then share a key head: each makes an equal part of it, and they put the parts together before anything
works on whole heads (norms, rotary positions, attention). Megatron-LM does so too
(`megatron/core/transformer/attention.py`, where `num_query_groups < world_size`), but gathers all heads on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hetmesh._torch_compat import not_compiled
from hetmesh.parallel.gaps import collective
from hetmesh.parallel.linear import Collective

KEY_HEADS = "num_key_value_heads"
"""Of the sizes that a degree must divide, the one that it may be a multiple of instead."""


@dataclass
class KeyHeads(ParallelStyle):
    """The style of an attention whose `k_proj` and `v_proj`, both colwise, make `heads` heads of `features` each, and
    which repeats keys and values `num_key_value_groups` times. Nothing with no more ranks than heads."""

    heads: int
    features: int

    def suits(self, degree: int) -> bool:
        """Whether each of `degree` ranks has whole heads, or an equal part of one."""
        each, rest = divmod(degree, self.heads)
        return self.heads % degree == 0 or (rest == 0 and self.features % each == 0)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if (sharing := device_mesh.size() // self.heads) > 1:
            attention: Any = module
            attention.num_key_value_groups //= sharing
            whole = partial(whole_head, sharing=sharing, group=device_mesh.get_group())
            for projection in (attention.k_proj, attention.v_proj):
                projection.register_forward_hook(lambda _, __, part: whole(part))
        return module


def unfit_sizes(sizes: Mapping[str, int], plan: Mapping[str, Any], degree: int) -> dict[str, int]:
    """Those of an adapter's `tensor_parallel_sizes` for which `degree` is wrong, under its plan. Where ranks would
    share key heads that they cannot cut evenly, it is wrong for the features of all of them."""
    shared = next((style for style in plan.values() if isinstance(style, KeyHeads)), None)
    wrong = {name: size for name, size in sizes.items() if size % degree}
    if shared is not None and KEY_HEADS in wrong and degree % shared.heads == 0:
        del wrong[KEY_HEADS]
        if not shared.suits(degree):
            wrong[f"{KEY_HEADS} * head_dim"] = shared.heads * shared.features
    return wrong


def tensor_parallel_degrees(sizes: Mapping[str, int], plan: Mapping[str, Any]) -> list[int]:
    """The degrees that suit all `sizes` under a plan, ascending; none where there are no sizes, and any degree does."""
    most = max((size for name, size in sizes.items() if name != KEY_HEADS), default=sizes.get(KEY_HEADS, 0))
    return [n for n in range(1, most + 1) if most % n == 0 and not unfit_sizes(sizes, plan, n)]


@not_compiled
def whole_head(part: Tensor, sharing: int, group: dist.ProcessGroup) -> Tensor:
    """`[..., features / sharing]` of each rank -> `[..., features]`: those of `sharing` neighbours joined."""

    def joined(part: Tensor) -> Tensor:
        return torch.cat(_exchanged(part.expand(sharing, *part.shape), group).unbind(), dim=-1)

    def summed(gradient: Tensor) -> Tensor:
        return _exchanged(torch.stack(gradient.chunk(sharing, dim=-1)), group).sum(0)

    return Collective.apply(part, joined, summed)


def _exchanged(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `pieces[i]` to the i-th of this rank's row; what each of them sent here, of the same shape.

    An all-to-all of the whole group, as rows have no communicators of their own."""
    sent = pieces.contiguous()
    got = torch.empty_like(sent)
    if sent.numel():
        sharing = len(sent)
        sizes = [0] * dist.get_world_size(group)
        first = dist.get_rank(group) // sharing * sharing
        sizes[first : first + sharing] = [sent[0].numel()] * sharing
        collective(dist.all_to_all_single, got.view(-1), sent.view(-1), sizes, sizes, group=group)
    return got
