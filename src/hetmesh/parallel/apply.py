"""One module on its mesh: everything that is done to it, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hetmesh.errors import LayoutError
from hetmesh.graph.module_graph import DEFAULT, ModuleOptions
from hetmesh.layout.mesh import MeshSpec
from hetmesh.parallel.activation_checkpoint import apply_activation_checkpoint
from hetmesh.parallel.compile import apply_compile
from hetmesh.parallel.compute_copies import ComputeCopies
from hetmesh.parallel.experts.block import ExpertLayers
from hetmesh.parallel.experts.routed_tokens import routed_tokens
from hetmesh.parallel.experts.shard_experts import apply_expert_parallel, apply_expert_sharding
from hetmesh.parallel.fully_shard import (
    WholeInStep,
    apply_fully_shard,
    fill_unused,
    fully_shard_arguments,
    sharded_forward,
)
from hetmesh.parallel.gradient_axes import ParameterAxes, fully_shard_axes, gradient_axes
from hetmesh.parallel.linear_cross_entropy import LOSS
from hetmesh.parallel.random_state import seed_by_place
from hetmesh.parallel.sequence_parallel import apply_sequence_parallel
from hetmesh.parallel.stage_views import prune, shared_parameters, view
from hetmesh.parallel.tensor_parallel import apply_tensor_parallel
from hetmesh.parallel.vocabulary import VocabularyShards, shard_vocabulary


class ParallelAdapter(Protocol):
    """The members of a `hetmesh.models.Adapter` that are used here."""

    def layers(self) -> tuple[str, ...]: ...
    def tensor_parallel_plan(self) -> Mapping[str, Any]: ...
    def forward(
        self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor | Mapping[str, Tensor]: ...


class AdaptedModule(nn.Module):
    """A ready-made module and how to call it, as one nn.Module. What wraps a whole module (FSDP's root, autocast) wraps
    this one, and so covers everything that the adapter does with the module's parts.

    Args:
        compute_dtype: of its computation and of the rows that it emits; incoming rows are brought to it.
        autocast: the device type of torch.autocast, where parameters are of another dtype and FSDP does not cast them.
        copies: with which it computes instead.
    """

    def __init__(
        self,
        adapter: ParallelAdapter,
        module: nn.Module,
        compute_dtype: torch.dtype,
        autocast: str | None = None,
        copies: ComputeCopies | None = None,
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.module = module
        self.compute_dtype = compute_dtype
        self.autocast, self.copies = autocast, copies

    def forward(self, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
        if (tokens := routed_tokens(self.module)) is not None:
            tokens.note(batch)
        inputs = {source: rows.to(self.compute_dtype) for source, rows in inputs.items()}
        casts = torch.autocast(self.autocast, self.compute_dtype) if self.autocast else nullcontext()
        halves = nullcontext() if self.copies is None else self.copies.forward()
        with casts, halves, sharded_forward(isinstance(self, FSDPModule)):
            output = self.adapter.forward(self.module, batch, inputs)
        if isinstance(output, Tensor):
            if isinstance(self, FSDPModule) and torch.is_grad_enabled() and not output.requires_grad:
                # These samples pass by what is trained; those of other lanes may not, and FSDP reduces on all ranks.
                output.requires_grad_(any(p.requires_grad for p in self.parameters()))
            return output.to(self.compute_dtype)
        return {name: rows if name == LOSS else rows.to(self.compute_dtype) for name, rows in output.items()}


class Root(nn.Module):
    """All modules of this rank under one root, so that every parameter has its own name: `llm.model.norm.weight`."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, module in modules:
            self.add_module(name, module)


@dataclass(frozen=True)
class ParallelModule:
    """A module on its mesh, as one member rank holds it.

    Attributes:
        module: the nn.Module, with its own FQNs; sharded parameters are DTensors. Without layers of others' stages.
        stages: each stage of this rank as the runtime calls it, with a batch and rows.
        axes: per parameter, over which axes of `spec` its gradient is summed, and along which it is sharded.
        tied: FQNs of the parameters that several layers of the whole module share.
        vocabulary: how the logits lie over the ranks of `tp`; None: each has all of them.
        used: per entry of `stages` whose forwards may use only some parameters: which were used (`fill_unused`).
        whole: per entry of `stages` of which FSDP keeps parameters whole during a step, or that computes with copies:
            what to tell of steps.
    """

    module: nn.Module
    stages: tuple[AdaptedModule, ...]
    spec: MeshSpec
    device_mesh: DeviceMesh
    axes: Mapping[str, ParameterAxes] = field(default_factory=dict)
    tied: frozenset[str] = frozenset()
    vocabulary: VocabularyShards | None = None
    used: Mapping[int, set[int]] = field(default_factory=dict)
    whole: Mapping[int, WholeInStep | ComputeCopies] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters_of(0)  # cached before any forward, while FSDP has its shards in place

    @property
    def adapted(self) -> AdaptedModule:
        """The whole module as the runtime calls it, where it is not split."""
        (only,) = self.stages
        return only

    def parameters_of(self, stage: int) -> dict[str, nn.Parameter]:
        """The parameters of entry `stage` of `stages` by FQN; one that several stages share belongs to the first."""
        return self._parameters[stage]

    @cached_property
    def _parameters(self) -> list[dict[str, nn.Parameter]]:  # asked for in every step
        owner: dict[int, int] = {}
        for i, stage in enumerate(self.stages):
            for p in stage.parameters():
                owner.setdefault(id(p), i)
        named = list(self.module.named_parameters())
        return [{name: p for name, p in named if owner.get(id(p)) == i} for i in range(len(self.stages))]


def parallelize(
    adapter: ParallelAdapter,
    module: nn.Module,
    spec: MeshSpec,
    device_mesh: DeviceMesh,
    plan: Mapping[str, Any] | None = None,
    options: ModuleOptions = DEFAULT,
    runs: Sequence[Sequence[str]] | None = None,
    token_sharded: Sequence[str] = (),
    token_gathered: Sequence[str] = (),
    splits_tokens: bool = False,
    head: str = "",
    experts: ExpertLayers | None = None,
    dense: DeviceMesh | None = None,
    gathered_whole: bool = False,
    unblocked: Sequence[str] = (),
) -> ParallelModule:
    """Shard `module` in place as `spec` says; only members call it. Nothing is sent. It may be without weights
    (`hetmesh.models.build_deferred`), which each rank then gets for what it keeps; else every rank holds the same full
    ones beforehand. So any layout starts from those of one process.

    Args:
        plan: the tensor parallel plan; None takes the adapter's own.
        options: how it runs; its parameters keep the dtype that they have.
        runs: the layers of each pipeline stage that this rank holds, in order; None: all layers as one stage.
        token_sharded: of sequence parallelism: FQNs of the submodules that work on a share of the tokens.
        token_gathered, splits_tokens: beside them (`Abilities` of an adapter).
        head: FQN of the layer that makes logits, if they may stay shares of the vocabulary where `tp` splits it.
        experts: the module's mixture-of-experts blocks, if it has any.
        dense: the handle of `graph.dense_mesh(spec)`, on which all other parameters lie; None: `device_mesh`, which is
            as good where `spec` has no `ep` axis, or nothing is sharded over it.
        gathered_whole: whether FSDP gathers all layers together, and some forwards use only some of the parameters.
        unblocked: layers that are no blocks, whatever parts they have: their forward may be called in parts, and their
            backward with it (`hetmesh.parallel.logits_or_loss`).

    Raises:
        LayoutError: the calling rank is no member, or `device_mesh` is not a handle of `spec`.
        RecipeError: the tensor parallel plan does not suit the module.
    """
    if MeshSpec.of(device_mesh) != spec:
        raise LayoutError(f"the device mesh {MeshSpec.of(device_mesh)} is not a handle of {spec}")
    if device_mesh.get_coordinate() is None:
        raise LayoutError(f"only members of {spec} hold its module; this rank is none")
    partial: tuple[str, ...] = ()
    vocabulary: VocabularyShards | None = None
    plan = adapter.tensor_parallel_plan() if plan is None else plan
    shared = token_sharded if options.sequence_parallel else ()
    seed_by_place(module, adapter.layers(), plan, shared, split=spec.axis_size("tp") > 1)
    dense = device_mesh if dense is None else dense
    if spec.axis_size("tp") > 1:
        partial = apply_tensor_parallel(module, dense["tp"], plan)
        vocabulary = shard_vocabulary(module, head)
    if experts is not None:
        apply_expert_parallel(module, experts, device_mesh)
    if spec.axis_size("tp") > 1 and options.sequence_parallel:
        splitting = () if splits_tokens else runs or [adapter.layers()]
        over_tokens = apply_sequence_parallel(module, dense["tp"], shared, token_gathered, splitting)
        partial = tuple(dict.fromkeys((*partial, *over_tokens)))
    tied = shared_parameters(module)
    if runs is not None:
        prune(module, adapter.layers(), [layer for run in runs for layer in run])
    sharded = bool(fully_shard_axes(spec))
    dtype = next((p.dtype for p in module.parameters()), options.parameter_dtype)
    compute_dtype = options.compute_dtype or dtype
    casts = compute_dtype != dtype and not sharded and not options.compute_copies
    layers = blocks(module, [module.get_submodule(name) for name in adapter.layers() if name not in unblocked])
    apply_activation_checkpoint(layers, options.activation_checkpoint, options.save_ops)
    if options.compile_backend is not None:
        apply_compile(layers, options.compile_backend, device_mesh.device_type)
    views = [module] if runs is None else [view(module, adapter.layers(), run) for run in runs]
    autocast = device_mesh.device_type if casts else None
    copies = ComputeCopies(module, compute_dtype) if options.compute_copies and not sharded else None
    stages = tuple(AdaptedModule(adapter, part, compute_dtype, autocast, copies) for part in views)
    used: dict[int, set[int]] = {}
    whole: dict[int, WholeInStep | ComputeCopies] = {} if copies is None else dict.fromkeys(range(len(stages)), copies)
    for i, stage in enumerate(stages if sharded else ()):
        held = set(stage.modules())
        apply_expert_sharding(stage, device_mesh, fully_shard_arguments(stage, options, device_mesh.device_type))
        alone = [] if gathered_whole else [layer for layer in layers if layer in held]
        if (kept := apply_fully_shard(stage, alone, dense, options)) is not None:
            whole[i] = kept
        if gathered_whole:
            used[i] = fill_unused(stage)
    axes = gradient_axes(dict(module.named_parameters()), spec, partial)
    return ParallelModule(module, stages, spec, device_mesh, axes, tied, vocabulary, used, whole)


_SMALL = 8  # a layer with less than this fraction of the largest one's parameters is no block


def blocks(root: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers that are modules of several parts, share no parameter with the rest of `root`, and are not small.

    A norm, a linear or the embedding of patches is too small to gather by itself (every gather and every reduction has
    a latency), and tied parameters need one owner.
    """
    owners: dict[int, int] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    several = [
        layer
        for layer in dict.fromkeys(layers)  # one that is listed twice is one block
        if any(True for _ in layer.children())
        and any(True for _ in layer.parameters())
        and all(owners[id(p)] == 1 for p in layer.parameters())
    ]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in several]
    return [layer for layer, size in zip(several, sizes, strict=True) if _SMALL * size >= max(sizes)]
