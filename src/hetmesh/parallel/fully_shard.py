"""Fully sharded data parallelism: torch's FSDP2 and HSDP, with gradients as sums.

Every member enters every layer in every microbatch, with zero rows if it has none, so the gathers and reductions of
all lanes match. Where data decide how often a module enters its layers, these are gathered together.

By default gradients are reduced in the backward of each microbatch and accumulate as shards. With
`reshard_after_forward = "never"` a step gathers and reduces once (`WholeInStep`): ZeRO-1 (Rajbhandari et al., SC 2020).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from hetmesh._torch_compat import REENTRANT, finish_fsdp_backward, fsdp_groups, graph_nodes, sum_in_reduce_dtype
from hetmesh.graph.module_graph import ModuleOptions
from hetmesh.layout.mesh import MeshSpec
from hetmesh.parallel.gradient_axes import fully_shard_axes
from hetmesh.parallel.gradient_sums import make_missing


def apply_fully_shard(
    root: nn.Module, blocks: Iterable[nn.Module], device_mesh: DeviceMesh, options: ModuleOptions
) -> WholeInStep | None:
    """Shard the parameters of `root` in place over the `dp_shard` axis of its mesh (with a `dp_replicate` axis: HSDP).

    Each of `blocks` is gathered by itself, right before its forward and backward. Everything else belongs to
    `root` and is gathered once for all of its forward; so is the first block where everything else is no larger.
    Tensor-parallel parameters, which are DTensors over `tp`, become DTensors over `dp_shard` and `tp`.

    Args:
        root: called for every forward, so that whatever an adapter does with its parts finds them gathered.
        device_mesh: the whole mesh of the module; has an axis `dp_shard`.

    Returns:
        What the runtime tells when a step begins and ends; None where a step makes no difference.
    """
    # FSDP warns that a hook on a view is lost when the view is changed in place; the runtime changes no output.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    arguments = fully_shard_arguments(root, options, device_mesh.device_type)
    arguments["mesh"] = device_mesh[fully_shard_axes(MeshSpec.of(device_mesh))]
    arguments["ignored_params"] = {p for p in root.parameters() if not p.ndim}  # scalars stay whole
    for block in gathered_alone(root, blocks):
        fully_shard(block, **arguments)
    arguments["reshard_after_forward"] = options.reshard_after_forward == "always"
    fully_shard(root, **arguments)
    sum_over_shards(root)
    whole = WholeInStep(root) if options.whole_in_step else None
    root.register_forward_hook(partial(_reshard_without_backward, whole))
    return whole


def fully_shard_arguments(root: nn.Module, options: ModuleOptions, device_type: str) -> dict[str, Any]:
    """The arguments of torch's `fully_shard` for a block inside `root`, but for its mesh."""
    arguments: dict[str, Any] = {"reshard_after_forward": options.reshard_after_forward != "never"}
    if options.compute_dtype is not None:
        trained = next((p.dtype for p in root.parameters() if p.requires_grad), options.parameter_dtype)
        arguments["mp_policy"] = MixedPrecisionPolicy(
            options.compute_dtype, reduce_dtype=options.reduce_dtype or trained
        )
    if options.cpu_offload:
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type != "cpu")
    return arguments


def sum_over_shards(root: nn.Module) -> None:
    """Make every `fully_shard` module inside `root` sum its gradients over the ranks of its mesh. By default it takes
    the mean; hetmesh normalises once, by the count of the whole batch."""
    for module in sharded_modules(root):
        # gloo and every sum need plain sums: a factor other than 1 would be a reduction that gloo does not have.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


class WholeInStep:
    """Keeps the parameters inside an FSDP root whole from its first action of a step to the last, forward or backward.

    Gradients add up as whole tensors meanwhile, in the dtype in which they are reduced, and the last backward reduces
    them, block by block, as it lets go of parameters. Which action is the last depends on the schedule, which the
    runtime knows. Between steps everything is sharded: optimizers, checkpoints and whoever moves experts see shards.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root, self.parts, self.left = root, sharded_modules(root), 0

    def begin(self, actions: int) -> None:
        """A step begins in which the root has that many actions on this rank."""
        self.left = actions
        self._reduce(False)

    @contextmanager
    def action(self, weights: bool = False) -> Iterator[None]:
        """The body is the next of them. `weights`: the second part of a split backward, which enters no module: what
        it adds to gradients is summed, or brought into the dtype of the sums, when it is over."""
        self.left -= 1
        if not self.left:
            sum_in_reduce_dtype(self.root)
            self._reduce(not weights)
        yield
        if not self.left:
            self._reduce(True)
        if weights or not self.left:
            # Where the last action had a backward this finds nothing to do, unless that entered no part of the root.
            finish_fsdp_backward(self.root)

    def abandon(self) -> None:
        """The step ended in the middle."""
        self.left = 0
        self._reduce(True)

    def _reduce(self, now: bool) -> None:
        for part in self.parts:
            part.set_requires_gradient_sync(now, recurse=False)
            part.set_reshard_after_backward(now, recurse=False)


def gathered_alone(root: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks that are gathered by themselves: all but the first, where what belongs to no block (a norm, the
    embedding of patches) is not larger than it. Both are needed at once, and each collective has a latency."""
    blocks = list(blocks)
    inside = {id(p) for block in blocks for p in block.parameters()}
    rest = sum(p.numel() for p in root.parameters() if id(p) not in inside)
    joined = bool(blocks) and 0 < rest <= sum(p.numel() for p in blocks[0].parameters())
    return blocks[1:] if joined else blocks


_in_backward: ContextVar[bool] = ContextVar("in_backward", default=False)


@contextmanager
def sharded_forward(sharded: bool) -> Iterator[None]:
    """In the body `needs_backward` is true where `sharded` is."""
    before = _in_backward.set(sharded)
    try:
        yield
    finally:
        _in_backward.reset(before)


def needs_backward() -> bool:
    """Whether the forward that runs is of a module that FSDP shards: its backward has to reduce, on every rank."""
    return _in_backward.get()


def fill_unused(root: nn.Module) -> set[int]:
    """Give zeros, in each backward, to the parameters of `root` that its forward did not use: other ranks may have used
    them, and FSDP reduces what has a gradient. Returns ids of the parameters that any forward with a backward used. The
    reader clears them."""
    used = set[int]()

    def fill(_: nn.Module, __: Any, output: Tensor) -> None:
        if not output.requires_grad:
            return
        nodes = list(graph_nodes([output.grad_fn]))
        hidden = any(node.name() == REENTRANT for node in nodes)  # it does not show what it uses
        found = {id(getattr(node, "variable", None)) for node in nodes}
        held = [parameter for _, group in fsdp_groups(root) for parameter in group.fsdp_params]
        if len(output):  # no rows come from a blank item, which does not show what samples use
            used.update(id(p.sharded_param) for p in held if hidden or id(p.unsharded_param) in found)
            used.update(id(p) for p in root.parameters() if not p.ndim and (hidden or id(p) in found))
        left = [p for p in (p.unsharded_param for p in held) if p.requires_grad and id(p) not in found]
        output.register_hook(lambda _: make_missing(left))

    root.register_forward_hook(fill)
    return used


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """`root` and its blocks, as FSDP made them."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _reshard_without_backward(
    whole: WholeInStep | None, root: nn.Module, _: Any, output: Tensor | Mapping[str, Tensor]
) -> None:
    """After a forward that no backward follows (evaluation, a frozen module) the backward cannot free what was
    gathered; and whoever reads the parameters next must find shards."""
    if whole is not None and whole.left:
        return  # to the next actions of the step
    outputs = [output] if isinstance(output, Tensor) else output.values()
    if not any(rows.requires_grad for rows in outputs):
        for module in sharded_modules(root):
            module.reshard()
