"""Measure what the layers of a recipe cost on this device, in one process, and fit a Profile to it.

Each kind of layer is called by itself, exactly as its module calls it: hooks record what the first layer of the kind is
given in a forward of the module on samples of the data source, and that call is repeated, with backwards for its input
alone, its parameters alone, and both. A module with tensor parallelism is measured whole and as one rank holds it; the
other ranks do not exist, and its collectives send nothing: `collective_profile.py` measures these, and where it cannot,
`cost/collective_time.py` has their seconds.

Repetitions go round all shapes, so that what else happens on the machine meets all of them alike, and medians are kept.
A CPU's time is that of the calling thread: other processes do not add to it. On CUDA a call counts from an idle device
until it is idle again: what the host takes longer than the device is in it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hetmesh._processes import one_torch_thread
from hetmesh._torch_compat import fake_process_group
from hetmesh.cost import LayerShape, Observation, Profile, Work, computed_work, fit, layer_kind
from hetmesh.data.drawn import DrawnSample
from hetmesh.data.loader import Loader
from hetmesh.models import Adapter, lora_plan
from hetmesh.models.draws import FIRST
from hetmesh.models.module_shape import HEAD, module_shape
from hetmesh.parallel.compute_copies import cast_parameters, casts_to
from hetmesh.parallel.linear_cross_entropy import sum_cross_entropy
from hetmesh.parallel.tensor_parallel import apply_tensor_parallel
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import ResolvedRecipe
from hetmesh.training.environment import choose_attention
from hetmesh.training.feed import of_loss

_LEAST_ROUNDS = 3
_MOST_ROUNDS = 100
_POOL = 4  # global batches from which the shortest and longest samples are taken


@dataclass(frozen=True)
class ShapeOf:
    """The samples of one measured microbatch.

    Attributes:
        drawn: the samples.
        held_out: it is not fitted, but what the fit is judged by.
    """

    drawn: tuple[DrawnSample, ...]
    held_out: bool


@dataclass(eq=False)
class _Call:
    """A layer with the arguments that its module gave it, for one shape."""

    kind: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Tensor], Tensor]
    rows: int
    pairs: int
    held_out: bool
    device: torch.device
    autocast: torch.dtype | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)


def profile_recipe(resolved: ResolvedRecipe, *, seconds: float = 45.0, device: str = "cpu") -> Profile:
    """Measure the layers of all modules of a recipe on one device of this machine, for about `seconds`.

    A CPU is measured with one thread. Where parameters and computation differ in dtype, layers run under autocast.

    In a process that has a process group already, modules are measured whole and not as tensor parallel ranks. Raises
    SampleError: the first samples do not suit the modules.
    """
    choose_attention(torch.device(device))  # what is measured is what trains
    graph, loader = resolved.graph, resolved.loader()
    shapes = sample_shapes(loader, resolved.recipe.batch.microbatch_size)
    with one_torch_thread(), ExitStack() as groups:
        degrees = {name: graph[name].mesh.axis_size("tp") for name in graph.order}
        sharded = max(degrees.values()) > 1 and not dist.is_initialized()
        if sharded:
            groups.enter_context(fake_process_group(max(degrees.values())))
        calls: list[_Call] = []
        for name, tp in degrees.items():
            meshes: list[DeviceMesh | None] = [None]
            if sharded and tp > 1:
                meshes.append(DeviceMesh(device, list(range(tp)), mesh_dim_names=("tp",)))
            for mesh in meshes:
                calls += _calls(resolved, name, loader, shapes, mesh, torch.device(device))
        _measure_all(calls, seconds)
    dtype = str(graph.llm.options.row_dtype).removeprefix("torch.")
    fitted, held_out = (_observations([call for call in calls if call.held_out is flag]) for flag in (False, True))
    return fit(fitted, held_out, dtype=dtype, device=device)


def sample_sizes(largest: int) -> list[tuple[int, bool]]:
    """From one sample to `largest`, doubling; whether one is held out, which every other is."""
    sizes = sorted({max(1, round(largest / 2**k)) for k in range(14)})
    last = len(sizes) - 1
    return [(size, 0 < i < last and (last - i) % 2 == 1) for i, size in enumerate(sizes)]


def sample_shapes(loader: Loader, largest: int) -> list[ShapeOf]:
    """Microbatches from one sample to `largest`, of short, of long and of any samples; every other size is held out."""
    pool = [drawn for step in range(_POOL) for drawn in loader.batch(step)]
    by_length = sorted(pool, key=lambda d: (d.meta.tokens, d.index))
    shapes = []
    for i, (size, held_out) in enumerate(sample_sizes(largest)):
        chosen = (by_length[:size], by_length[-size:], pool[i * size : (i + 1) * size] or pool[:size])
        shapes += [ShapeOf(tuple(shape), held_out) for shape in chosen]
    return shapes


def _calls(
    resolved: ResolvedRecipe,
    name: str,
    loader: Loader,
    shapes: Sequence[ShapeOf],
    mesh: DeviceMesh | None,
    device: torch.device,
) -> Iterator[_Call]:
    """What the layers of one module are called with, for each shape that gives it something to do. `mesh`: of its
    tensor parallel ranks; None: the module is whole."""
    recipe, adapter, graph = resolved.recipe, resolved.adapters[name], resolved.graph
    module = loaded_module(recipe, adapter, name).requires_grad_(True).to(device)
    compute = graph[name].options.row_dtype
    if graph[name].options.compute_copies:
        cast_parameters(module.parameters(), compute)
    autocast = compute if any(casts_to(p, compute) for p in module.parameters()) else None
    layers: dict[str, LayerShape] = {}
    for layer in module_shape(name, adapter, module).layers:
        if layer.name:
            layers.setdefault(layer_kind(layer, 1 if mesh is None else mesh.size()), layer)
    if mesh is not None:
        plan = lora_plan(module, {**adapter.tensor_parallel_plan(), **recipe.modules[name].plan})
        apply_tensor_parallel(module, mesh, plan)
    known: set[tuple[int, int, int]] = set()
    for shape in shapes:
        work = computed_work(graph, name, [d.meta for d in shape.drawn])
        key = (work.rows, work.pairs, work.targets)
        if work.rows and key not in known:
            known.add(key)
            batch, inputs = _inputs(resolved, name, loader, shape.drawn)
            batch, inputs = (
                {key: value.to(device) if isinstance(value, Tensor) else value for key, value in each.items()}
                for each in (batch, inputs)
            )
            yield from _recorded(adapter, module, layers, work, batch, inputs, shape.held_out, device, autocast)


def _inputs(
    resolved: ResolvedRecipe, name: str, loader: Loader, drawn: Sequence[DrawnSample]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The module's own inputs, and random rows in place of its producers'."""
    graph, adapter = resolved.graph, resolved.adapters[name]
    spec, metas = graph[name], [d.meta for d in drawn]
    rows: dict[str, Tensor] = {}
    for b in graph.inputs(name):
        count = sum(meta.rows.get(b.key if graph.out_of_llm(b) else b.source, 0) for meta in metas)
        rows[b.key] = torch.randn(count, graph[b.source].features, dtype=spec.options.row_dtype)
    compared = spec.loss is not None and name in graph.topology.after_llm
    if rows and name != graph.llm.name and not compared:
        return {}, rows
    source = loader.source
    batch = adapter.collate(loader.load(drawn), metas, placeholders=source.placeholders, pad_id=source.pad_id)
    return (batch | of_loss(adapter, spec, metas, FIRST) if compared else batch), rows


def _recorded(
    adapter: Adapter,
    module: nn.Module,
    layers: Mapping[str, LayerShape],
    work: Work,
    batch: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    held_out: bool,
    device: torch.device,
    autocast: torch.dtype | None,
) -> Iterator[_Call]:
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def record(kind: str) -> Callable[..., None]:
        return lambda _, args, kwargs: given.__setitem__(kind, (args, kwargs))

    parts = {kind: module.get_submodule(layer.name) for kind, layer in layers.items()}
    hooks = [part.register_forward_pre_hook(record(kind), with_kwargs=True) for kind, part in parts.items()]
    with torch.no_grad(), _autocast(device, autocast):
        adapter.forward(module, batch, inputs)
    for hook in hooks:
        hook.remove()
    for kind, (args, kwargs) in given.items():
        layer = layers[kind]
        head = layer.on_targets and layer.name == HEAD
        finish = (lambda logits: sum_cross_entropy(logits, batch)) if head else (lambda output: output)
        rows = work.targets if layer.on_targets else work.rows
        if rows:
            pairs = work.pairs if layer.attention_width else 0
            yield _Call(kind, parts[kind], args, kwargs, finish, rows, pairs, held_out, device, autocast)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _clock(device: torch.device) -> float:
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def _measure_all(calls: Sequence[_Call], seconds: float) -> None:
    """Rounds over all calls until the time is over; the first one warms up. Each has an order of its own: what a call
    finds in the caches depends on the one before it."""
    started, order = time.perf_counter(), random.Random(0)
    for round_ in range(1 + _MOST_ROUNDS):
        if round_ > _LEAST_ROUNDS and time.perf_counter() - started > seconds * round_ / (round_ + 1):
            break
        for call in order.sample(calls, len(calls)):
            measured = _measure(call)
            if round_:
                for part, spent in measured.items():
                    call.seconds.setdefault(part, []).append(spent)


def _observations(calls: Sequence[_Call]) -> list[Observation]:
    """One for each part of each kind and size: of calls of one size all that was measured."""
    measured: dict[tuple[str, str, int, int], list[float]] = defaultdict(list)
    for call in calls:
        for part, seconds in call.seconds.items():
            measured[call.kind, part, call.rows, call.pairs] += seconds
    return [Observation(*key, statistics.median(seconds)) for key, seconds in measured.items()]


def _measure(call: _Call) -> dict[str, float]:
    """Seconds of each of `PARTS`; 0 for a backward that the layer does not have."""
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if leaves or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().requires_grad_())
        return leaves[0]

    args = tuple(leaf(value) for value in call.args)
    kwargs = {key: leaf(value) for key, value in call.kwargs.items()}
    parameters: list[Tensor] = [p for p in call.layer.parameters() if p.requires_grad]
    with torch.enable_grad(), _autocast(call.device, call.autocast):
        started = _clock(call.device)
        output = call.layer(*args, **kwargs)
        output = call.finish(output if isinstance(output, Tensor) else output[0])
        spent = {"forward": _clock(call.device) - started}
    gradient = torch.ones_like(output)
    both = {"backward_input": leaves, "backward_weight": parameters, "backward": [*leaves, *parameters]}
    for part, wanted in both.items():
        started = _clock(call.device)
        if wanted:
            torch.autograd.grad(output, wanted, gradient, retain_graph=part != "backward", allow_unused=True)
        spent[part] = _clock(call.device) - started if wanted else 0.0
    return spent
