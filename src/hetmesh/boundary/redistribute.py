"""hetmesh.redistribute: a boundary in a plain script, as one differentiable call that every rank makes.

Backward of a boundary is a transfer too, so every rank must run it, also ranks that hold no loss. A *token* (a 0-d
tensor) threads all boundaries of the process into one chain: `hetmesh.backward` starts at the end of the chain on
every rank, and the boundaries' backwards run in reverse order of the forwards on all of them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hetmesh._torch_compat import averaged_over
from hetmesh.boundary import pending
from hetmesh.boundary.log import Label
from hetmesh.boundary.plan_exchange import Exchange
from hetmesh.boundary.rank_step import contiguous_stride
from hetmesh.boundary.transport import check_transport, choose
from hetmesh.boundary.world import World
from hetmesh.errors import BoundaryError
from hetmesh.layout import Layout, MeshSpec, Placement, TransferPlan, plan_gradient, plan_transfer


@contextlib.contextmanager
def _dropped_on_error() -> Iterator[None]:
    """An error in the body is one of this step: nothing is pending then, and tags are those of before."""
    world = World.current()
    transfers = world.transfers
    try:
        yield
    except BaseException:
        pending.drop()
        world.transfers = transfers
        raise


@_dropped_on_error()
def redistribute(
    x: Tensor | DTensor | None,
    dst: Layout,
    *,
    src: Layout | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = True,
    grad_placements: Sequence[Placement] | None = None,
    transport: str = "auto",
    name: str | None = None,
    microbatch: int = 0,
) -> Tensor | DTensor | None:
    """Bring a tensor from its layout to layout `dst`, on any ranks, differentiably. Every rank of the job calls it.

    The backward brings the gradient back as the exact adjoint: a gradient of a Replicate source is Replicate, of a
    Partial source Replicate, of a Shard source Shard. Gradients are sums: no module before or after a boundary may
    average its own. FSDP2's `fully_shard` does unless `set_gradient_divide_factor` has been called: `hetmesh.backward`
    refuses it where the module's input carries a gradient. DistributedDataParallel averages too, and cannot be seen.

    Args:
        x: this rank's share under `src` (a local tensor or a DTensor); None on ranks outside `src`.
        dst: the layout of the result.
        src, shape, dtype: layout, global shape and element type of `x`, equal on all ranks. They may be left out
            where every rank holds `x` as a DTensor.
        requires_grad: whether a gradient flows back; static and equal on all ranks.
        grad_placements: placements on `dst.mesh` of the gradient that this rank's code produces for a local result.
            By default the gradient of a replica counts as the whole gradient; pass `Partial()` for an axis along
            which each replica produces a summand.
        transport: `auto`, `p2p`, `all_to_all` or `dtensor`; equal on all ranks.
        name: how logs and errors call this boundary.
        microbatch: its number, where a boundary is crossed several times before one `hetmesh.backward`.

    Returns:
        On ranks of `dst` a DTensor if all its placements are torch's own, else the local tensor; on ranks of `src`
        only, a zero-row tensor on the autograd path; elsewhere None. It shares no memory with `x`. Call
        `hetmesh.backward(loss_or_y)` on every rank.

    Raises:
        BoundaryError: the arguments contradict each other, the tensor does not have the promised local shape, or
            `hetmesh.backward` was forgotten. What was pending for it is dropped.
        LayoutError: the layouts cannot be joined, or name ranks that this job does not have.
        BoundaryTimeout: a peer did not answer in time.
    """
    world = World.current()
    arguments = {
        "x": (x, "a tensor or None", x is None or isinstance(x, Tensor)),
        "dst": (dst, "a hetmesh.Layout", isinstance(dst, Layout)),
        "src": (src, "a hetmesh.Layout or None", src is None or isinstance(src, Layout)),
        "dtype": (dtype, "a torch.dtype or None", dtype is None or isinstance(dtype, torch.dtype)),
        "requires_grad": (requires_grad, "True or False", isinstance(requires_grad, bool)),
        "grad_placements": (grad_placements, "a sequence of placements or None", _is_sequence(grad_placements)),
        "name": (name, "a string or None", name is None or isinstance(name, str)),
        "microbatch": (microbatch, "a whole number >= 0", _is_size(microbatch)),
        "shape": (shape, "whole numbers >= 0", _is_sequence(shape) and all(map(_is_size, shape or ()))),
    }
    for argument, (value, valid, good) in arguments.items():
        if not good:
            raise BoundaryError(f"redistribute: {argument} must be {valid}, got {value!r} ({type(value).__name__})")
    check_transport(transport)
    shape = None if shape is None else tuple(map(operator.index, shape))
    label = Label(f"redistribute {world.transfers}" if name is None else name, microbatch)
    for layout in (dst, src):
        if layout is not None:
            world.check_layout(layout)
    requires_grad = requires_grad and torch.is_grad_enabled()
    pending.check(label, name is not None, requires_grad)
    world.connect()
    src, shape, dtype = _complete(world, label, x, src, shape, dtype)
    plan = plan_transfer(shape, src, dst, ranks_per_node=world.ranks_per_node)
    grad_layout = dst.gradient()
    if grad_placements is not None:
        if dst.is_dtensor:
            raise BoundaryError(f"{label}: a DTensor's gradient carries its own placements; leave grad_placements out")
        grad_layout = Layout(dst.mesh, tuple(grad_placements))
        if grad_layout.cells(shape) and any(
            dst.local_shape(shape, r) != grad_layout.local_shape(shape, r) for r in dst.mesh.ranks
        ):
            raise BoundaryError(f"{label}: grad_placements {grad_layout.placements} do not fit the result {dst}")
    back = plan_gradient(shape, grad_layout, src, ranks_per_node=world.ranks_per_node)
    # The adjoint of a collective that torch does well may be one that it emulates: a forced dtensor holds forward only.
    transports = (transport, "auto" if transport == "dtensor" else transport)
    # Both tags now: a backward that fails on some ranks must not put those of the next step out of order.
    crossing = _Crossing(world, plan, back, label, dtype, transports, (world.next_tag(), world.next_tag()))
    crossing.prepare()
    mesh = world.device_mesh(dst.mesh) if dst.is_dtensor else None
    local = x.to_local() if isinstance(x, DTensor) else x
    if requires_grad:
        token, y = _Boundary.apply(pending.cross(label, name is not None, world.device), local, crossing)
        pending.crossed(token)
    else:
        with torch.no_grad():
            y = crossing.forward(local)
    if world.rank in dst.mesh:
        if mesh is None or y is None:
            return y
        return DTensor.from_local(
            y, mesh, dst.torch_placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
        )
    return y if world.rank in src.mesh else None


def _is_sequence(value: object) -> bool:
    return value is None or (isinstance(value, Sequence) and not isinstance(value, str))


def _is_size(value: object) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= 0  # type: ignore[arg-type]
    except TypeError:
        return False


def backward(loss: Tensor | DTensor | None = None) -> None:
    """Run backward on this rank, through all boundaries since the last call. Every rank calls it.

    Args:
        loss: a scalar on ranks that have one; what `redistribute` returned on source-only ranks; or None.

    Raises:
        BoundaryError: `loss` is neither a scalar nor an empty stand-in, or a module beside a boundary averages its
            gradients. Nothing is pending any more.
    """
    token = pending.take()
    if loss is not None and not isinstance(loss, Tensor):
        raise BoundaryError(f"hetmesh.backward needs a loss or None, got {type(loss).__name__}")
    roots = [] if loss is None or not loss.requires_grad else [loss]
    if roots and roots[0].numel() > 1:
        raise BoundaryError(f"hetmesh.backward needs a scalar loss or a stand-in, got shape {tuple(roots[0].shape)}")
    grads = [torch.ones_like(root) for root in roots]
    if token is not None:
        roots.append(token)
        grads.append(torch.zeros_like(token))
        _refuse_averages(roots)
    if roots:
        with pending.running():
            torch.autograd.backward(roots, grads)


def abandon() -> None:
    """Give up the backward of all boundaries since the last `hetmesh.backward`: after a step that failed in code of
    your own, before the next one. Every rank calls it."""
    pending.drop()


def _refuse_averages(roots: Sequence[Tensor]) -> None:
    """Raise BoundaryError if a module in this graph, which has boundaries, averages its gradients."""
    for module, ranks in averaged_over([root.grad_fn for root in roots]):
        raise BoundaryError(
            f"the fully_shard module {module} averages its gradients over {ranks} ranks, and boundaries sum theirs: "
            f"modules on the two sides would get gradients that differ by a factor of {ranks}. Call "
            "module.set_gradient_divide_factor(1.0) on it (on gloo module.set_force_sum_reduction_for_comms(True) "
            "before), and scale the loss once, by what the whole batch counts"
        )


@dataclass(frozen=True)
class _Crossing:
    """Everything that one call of redistribute fixes for its forward and backward."""

    world: World
    plan: TransferPlan
    back: TransferPlan
    label: Label
    dtype: torch.dtype
    transports: tuple[str, str]
    tags: tuple[int, int]

    def prepare(self) -> None:
        """Build process groups and meshes here, where every rank passes: building them is collective."""
        for plan, transport in zip((self.plan, self.back), self.transports, strict=True):
            chosen = choose(plan, self.world.link, transport)
            if chosen == "all_to_all":
                for step in plan.steps:
                    self.world.group(sorted({*step.src.mesh.ranks, *step.dst.mesh.ranks}))
            elif chosen == "dtensor":
                self.world.device_mesh(plan.src.mesh)

    def run(self, local: Tensor | None, *, forward: bool) -> Tensor | None:
        """Carry out the transfer or its adjoint on this rank."""
        plan = self.plan if forward else self.back
        label = self.label if forward else replace(self.label, direction="backward")
        transport = self.transports[0 if forward else 1]
        tag = self.tags[0 if forward else 1]
        return Exchange(self.world, plan, local, self.dtype, label, transport=transport, tag=tag).start().finish()

    def forward(self, local: Tensor | None) -> Tensor:
        """The result on this rank, in new memory."""
        y = self.run(None if local is None else local.detach(), forward=True)
        if y is None:  # no rows stand for the result outside the destination
            return torch.empty((0, *self.plan.shape[1:]), dtype=self.dtype, device=self.world.device)
        return y.clone() if self.plan.is_identity else y


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token: Tensor, local: Tensor | None, crossing: _Crossing):
        ctx.crossing = crossing
        # An unused result has no gradient; its peers still wait for the message, so None must reach backward.
        ctx.set_materialize_grads(False)
        return token.clone(), crossing.forward(local)

    @staticmethod
    def backward(ctx, grad_token: Tensor | None, grad: Tensor | None):
        crossing: _Crossing = ctx.crossing
        pending.check_running(crossing.label)
        plan, rank = crossing.back, crossing.world.rank
        local = None
        if rank in plan.src.mesh:
            local = grad
            if local is None:
                shape = plan.src.local_shape(plan.shape, rank)
                local = torch.zeros(shape, dtype=crossing.dtype, device=crossing.world.device)
        back = crossing.run(local, forward=False)
        return grad_token, back, None


def _complete(
    world: World,
    label: Label,
    x: Tensor | DTensor | None,
    src: Layout | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> tuple[Layout, tuple[int, ...], torch.dtype]:
    """Fill in what a DTensor tells; refuse what contradicts it or cannot be trusted."""
    if isinstance(x, DTensor) and x.device_mesh.get_coordinate() is not None:
        if not world.made(x.device_mesh):
            raise BoundaryError(
                f"{label}: torch sorts the ranks of a mesh axis silently, so collectives on {x.device_mesh} permute "
                "data; build it with hetmesh.device_mesh(MeshSpec(...))"
            )
        actual = Layout(MeshSpec.of(x.device_mesh), tuple(x.placements))
        if src is None:
            src = actual
        elif (actual.mesh.ranks, actual.mesh.sizes, actual.placements) != (
            src.mesh.ranks,
            src.mesh.sizes,
            src.placements,
        ):
            raise BoundaryError(f"{label}: x lies as {actual}, but src says {src}")
        if shape is not None and tuple(shape) != tuple(x.shape):
            raise BoundaryError(f"{label}: x has global shape {tuple(x.shape)}, but shape says {tuple(shape)}")
        shape, dtype = tuple(x.shape), dtype or x.dtype
    missing = [k for k, v in (("src", src), ("shape", shape), ("dtype", dtype)) if v is None]
    if src is None or shape is None or dtype is None:
        raise BoundaryError(
            f"{label}: {', '.join(missing)} must be given on every rank unless all of them hold x as a DTensor; "
            f"rank {world.rank} holds {type(x).__name__}"
        )
    return src, tuple(int(s) for s in shape), dtype
