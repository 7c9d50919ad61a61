"""Sequence parallelism: between attention and MLP each tensor-parallel rank keeps a share of the tokens.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.2.2.
The flat tokens `[B * S, features]` are cut into equal contiguous shares, the last padded (`context.token_owners`),
so any lengths are exact. Norms and residuals run on `[1, share, features]`. Attention and MLP gather all tokens where
they start and reduce-scatter where they end: as many bytes as the two all-reduces that they replace. What was gathered
is not kept: the backward gathers once more what the gradients of weights read. An attention that tensor parallelism
leaves whole makes all tokens on every rank, which keeps its share; of that alone it has gradients, so that they are
summands there, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import pad

from hetmesh._torch_compat import all_gather_single, keeps_are_hooked, not_compiled, reduce_scatter_single
from hetmesh.context.token_owners import TokenShares
from hetmesh.parallel.experts.block import ExpertBlock
from hetmesh.parallel.gaps import collective
from hetmesh.parallel.linear import Collective, ColwiseLinear, RowwiseLinear, leave
from hetmesh.parallel.random_state import current_microbatch
from hetmesh.parallel.tensor_parallel import matches, within
from hetmesh.parallel.tokens import SHARE, WHICH, AllTokens


def apply_sequence_parallel(
    module: nn.Module,
    tp_mesh: DeviceMesh,
    prefixes: Sequence[str],
    gathered: Sequence[str] = (),
    runs: Sequence[Sequence[str]] = (),
) -> tuple[str, ...]:
    """Split what runs between the tensor-parallel parts of `module`, in place; after `apply_tensor_parallel`.

    Args:
        prefixes: FQNs of the submodules that work on shares of the tokens (`Abilities.token_sharded` of an adapter).
        gathered: patterns of the parts within them that read all tokens, although nothing in them is sharded.
        runs: layers of each pipeline stage of this rank, which split and join tokens; none if its forward does.

    Returns:
        FQNs of the parameters whose gradients are partial over tp: those of `prefixes` that are not sharded.
    """
    group = tp_mesh.get_group()
    tokens = ShardedTokens(group)
    for run in runs:
        tokens.split_in(module, run, prefixes)
    wrapped = {part for m in module.modules() if hasattr(m, "base_layer") for part in m.modules()}
    blocks = [name for name, part in module.named_modules() if isinstance(part, ExpertBlock)]
    for name, parent in module.named_modules():
        if parent in wrapped or not within(name, *prefixes):
            continue
        # A layer with adapters (LoRA) holds several linears. What A of a row-wise one gives is scattered, too, so its B
        # sees a share of the tokens; behind A of a column-wise one each rank's B sees a share of the features.
        own = [c for c in parent.children() if c in wrapped or isinstance(c, ColwiseLinear | RowwiseLinear)]
        linears = [part for child in own for part in child.modules()]
        if any(isinstance(part, RowwiseLinear) for part in linears):
            inside = within(name, *blocks)  # a shared expert: its block gathers all tokens, and scatters the sum
            readers = [] if inside else [parent]
            if any(name in run for run in runs):  # a block that has the linears of its MLP in itself
                readers = [c for c in own if any(isinstance(part, ColwiseLinear) for part in c.modules())]
            for reader in readers:
                _Gather(group, tokens).register(reader)
            for part in linears:
                if isinstance(part, ColwiseLinear):
                    part.enter = lambda x: x  # the gather sums the gradient
                elif isinstance(part, RowwiseLinear):
                    part.leave = (lambda x: x) if inside else partial(_scatter, group=group)
        elif isinstance(parent, ExpertBlock):
            _Gather(group, tokens).register(parent)
            parent.enter, parent.leave, parent.shares_summand = None, partial(_scatter, group=group), True
            parent.balances = dist.get_rank(group) == 0  # the router's gradients are now partial, too: each counts once
        elif any(matches(name, pattern) for pattern in gathered):
            _Gather(group, tokens).register(parent)
            parent.register_forward_hook(partial(_keep_share, group))
    module.hetmesh_tokens = tokens  # type: ignore[assignment]
    return tuple(
        name for name, p in module.named_parameters() if within(name, *prefixes) and not isinstance(p, DTensor)
    )


class ShardedTokens(AllTokens):
    """The share of a lane's tokens that this rank of a group keeps.

    Attributes:
        by_hooks: whether hooks of the module split tokens and join them, so that its own forward need not.
        apart: whether they are split where the forward is now.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.by_hooks = self.apart = False
        self._shapes: dict[int, tuple[int, ...]] = {}  # by microbatch: a block may be computed again much later

    def split(self, flat: Tensor) -> Tensor:
        total, group = len(flat), self.group
        size = TokenShares(total, dist.get_world_size(group)).size
        return Collective.apply(flat, lambda x: _own_share(x, size, group), lambda g: _all_gather(g, group)[:total])

    def split_in(self, module: nn.Module, layers: Sequence[str], prefixes: Sequence[str]) -> None:
        """Let the first of the `layers` of `module` that are within `prefixes` split tokens, and the last join them.
        Layers beside them read all tokens, also one that is called in between (of DeepStack)."""
        self.by_hooks = True
        inside = [layer for layer in layers if within(layer, *prefixes)]

        def split(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.apart, whole = True, hidden_of(args, kwargs)  # [..., features] of all tokens
            self._shapes[current_microbatch()] = tuple(whole.shape[:-1])
            return with_hidden(args, kwargs, self.split(whole.flatten(0, -2))[None])

        def join(_: nn.Module, __: Any, output: Any) -> Any:
            self.apart = False
            return self.join(output) if isinstance(output, Tensor) else (self.join(output[0]), *output[1:])

        def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_hidden(args, kwargs, self.join(hidden_of(args, kwargs))) if self.apart else None

        for layer in layers:
            if layer not in inside:
                module.get_submodule(layer).register_forward_pre_hook(read, with_kwargs=True)
        if inside:
            module.get_submodule(inside[0]).register_forward_pre_hook(split, with_kwargs=True)
            module.get_submodule(inside[-1]).register_forward_hook(join)

    def join(self, share: Tensor) -> Tensor:
        """All tokens from the shares of all ranks, on every rank; its gradient is the same on all of them."""
        shape = self._shapes[current_microbatch()]
        flat, total, group = share.flatten(0, -2), math.prod(shape), self.group
        size = len(flat)
        whole = Collective.apply(flat, lambda x: _all_gather(x, group)[:total], lambda g: _own_share(g, size, group))
        return whole.view(*shape, -1)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of all tokens of the microbatch that is computed, if it is known."""
        return self._shapes.get(current_microbatch())

    def locate(self, batch: Mapping[str, Tensor], key: str) -> Tensor:
        return batch[SHARE + key]

    def as_input(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        self._shapes[current_microbatch()] = tuple(shape)
        return flat[None]

    def mask(self, flat: Tensor) -> Tensor | None:
        return flat.new_zeros(1, 1, 1, 1)  # four dims count as finished; the gather puts it aside

    def spread(self, rows: Tensor, batch: Mapping[str, Tensor], key: str) -> Tensor:
        """Rows for all positions `batch[key]`: those in this rank's share, and zeros for the others."""
        return rows.new_zeros(len(batch[key]), rows.shape[-1]).index_copy(0, batch[WHICH + key], rows)

    def select(self, flat: Tensor, batch: Mapping[str, Tensor], key: str) -> Tensor:
        rows = flat.index_select(0, self.locate(batch, key))
        # Every row has one owner: the sum puts the shares together. Its gradient is the same on all ranks.
        return leave(self.spread(rows, batch, key), self.group)


class _Gathered:
    """What autograd keeps of a part of the module: of the tokens that were gathered for it this rank's share, which the
    backward gathers again, once for all that read them (queries, keys, values)."""

    def __init__(self, share: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        self.share, self.group = share.detach(), group
        self.storage, self.versions = StorageWeakRef(whole.untyped_storage()), (share._version, whole._version)
        self.again: Tensor | None = None

    def pack(self, tensor: Tensor) -> tuple[Tensor, int, Any]:
        if StorageWeakRef(tensor.untyped_storage()) == self.storage and tensor._version == self.versions[1]:
            return self.share, self.versions[0], (tensor.size(), tensor.stride(), tensor.storage_offset())
        return tensor, tensor._version, None

    def unpack(self, kept: tuple[Tensor, int, Any]) -> Tensor:
        tensor, version, view = kept
        if tensor._version != version:
            raise RuntimeError("a tensor that the backward needs was changed in place after it was read")
        if view is None:
            return tensor
        if self.again is None:
            self.again = _all_gather(self.share, self.group)
        return self.again.as_strided(*view)


class _Gather:
    """Before attention or MLP: `[1, share, features]` -> all tokens, `[B, S, features]` where tokens meet (known by the
    arguments beside them) or hooks split them, else `[1, padded, features]`."""

    def __init__(self, group: dist.ProcessGroup, tokens: ShardedTokens) -> None:
        self.group, self.tokens = group, tokens
        self.hooks: saved_tensors_hooks | None = None

    def register(self, part: nn.Module) -> None:
        """Let `part`, the attention or MLP, read all tokens. What is kept, checkpointing or offloading decides."""
        part.register_forward_pre_hook(self, with_kwargs=True)
        part.register_forward_hook(self._keep_all, always_call=True)

    @not_compiled
    def _keep_all(self, *_: object) -> None:
        if self.hooks is not None:
            self.hooks.__exit__()
        self.hooks = None

    @not_compiled
    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, group = hidden_of(args, kwargs).flatten(0, -2), self.group
        size = len(flat)
        whole = Collective.apply(flat, lambda x: _all_gather(x, group), lambda g: _reduce_scatter(g, size, group))
        if torch.is_grad_enabled() and not keeps_are_hooked():
            gathered = _Gathered(flat, whole, group)
            self.hooks = saved_tensors_hooks(gathered.pack, gathered.unpack)
            self.hooks.__enter__()
        meet = kwargs.keys() & {"attention_mask", "position_embeddings"}
        if (self.tokens.by_hooks or meet) and (shape := self.tokens.shape) is not None:
            if not self.tokens.by_hooks:
                kwargs = {**kwargs, "attention_mask": None}  # right padding and causal attention need none
            whole = whole[: math.prod(shape)].view(*shape, -1)
        else:
            whole = whole[None]
        return with_hidden(args, kwargs, whole)


@not_compiled
def _scatter(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """After attention or MLP: each rank's summand of all tokens -> the sum for its share, `[1, share, features]`."""
    flat = summand.flatten(0, -2)
    total = len(flat)
    size = TokenShares(total, dist.get_world_size(group)).size
    scatter, gather = lambda x: _reduce_scatter(x, size, group), lambda g: _all_gather(g, group)[:total]
    return Collective.apply(flat, scatter, gather)[None]


@not_compiled
def _keep_share(group: dist.ProcessGroup, _: nn.Module, __: Any, output: Any) -> Any:
    """After a part that every rank computes of all tokens: of its output this rank's share, `[1, share, features]`."""
    flat = (output if isinstance(output, Tensor) else output[0]).flatten(0, -2)
    kept = _own_share(flat, TokenShares(len(flat), dist.get_world_size(group)).size, group)[None]
    return kept if isinstance(output, Tensor) else (kept, *output[1:])


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The tokens among the arguments of a block or a part of one, as transformers hands them on."""
    return args[0] if args else kwargs["hidden_states"]


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[Any, dict[str, Any]]:
    """The same arguments with other tokens."""
    return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})


def _own_share(flat: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    kept = flat[dist.get_rank(group) * size :][:size]
    return pad(kept, (0, 0, 0, size - len(kept)))


def _all_gather(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = share.new_empty(dist.get_world_size(group) * len(share), *share.shape[1:])
    collective(all_gather_single, whole, share.contiguous(), group=group)
    return whole


def _reduce_scatter(flat: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    padded = flat
    if missing := dist.get_world_size(group) * size - len(flat):
        padded = torch.cat([flat, flat.new_zeros(missing, *flat.shape[1:])])
    share = flat.new_empty(size, *flat.shape[1:])
    collective(reduce_scatter_single, share, padded.contiguous(), group=group)
    return share
