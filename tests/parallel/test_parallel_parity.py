"""TP and DP against one process on real processes: loss and every gradient, gathered, in fp64."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from hetmesh.boundary import device_mesh
from hetmesh.data.digits import DigitsSource
from hetmesh.data.expand import Expander, expand_tokens
from hetmesh.graph.topology import BoundarySpec
from hetmesh.layout.mesh import MeshSpec
from hetmesh.models import build_module, make_adapters
from hetmesh.parallel import (
    Reduction,
    apply_tensor_parallel,
    gradient_axes,
    local_part,
    parallelize,
)
from hetmesh.testing.precision import exact_dtypes
from support.expanding import expand

pytestmark = pytest.mark.slow

VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
LLM = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "intermediate_size": 50,  # 13 + 13 + 13 + 11 over four ranks; the vocabulary of 23 is uneven over two
}


def recipe(**llm: Any):
    modules = {
        "vision": SimpleNamespace(model="siglip", config=VISION),
        "projector": SimpleNamespace(model="mlp", config={"hidden_features": 9}),
        "llm": SimpleNamespace(model="qwen3", config={**LLM, **llm}),
    }
    boundaries = [BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm", "image")]
    return make_adapters(modules, boundaries, {"vision": "image"}, DigitsSource.vocab_size, {"image": (1, 8, 8)})


def samples(adapters, kinds: tuple[str, ...]):
    """Digits questions of these kinds, expanded."""
    source = DigitsSource()
    pairs, index = [], 0
    for kind in kinds:
        while source.kind(index) != kind:
            index += 1
        meta = source.meta(index)
        expanded = expand(Expander({"image": adapters["vision"].item_rows}), meta).meta
        pairs.append((expand_tokens(source.load(index), meta, expanded, source.placeholders), expanded))
        index += 1
    return pairs


def run(adapters, modules, pairs) -> torch.Tensor:
    """Forward and backward of the chain on the same ranks; the sum loss."""
    batches = {
        name: a.collate([s for s, _ in pairs], [m for _, m in pairs], placeholders=DigitsSource.placeholders, pad_id=0)
        for name, a in adapters.items()
    }
    with exact_dtypes(*modules.values()):
        rows = adapters["vision"].forward(modules["vision"], batches["vision"], {})
        rows = adapters["projector"].forward(modules["projector"], {}, {"vision": rows})
        logits = adapters["llm"].forward(modules["llm"], batches["llm"], {"projector": rows})
    loss = cross_entropy(logits, batches["llm"]["targets"], reduction="sum")
    loss.backward()
    return loss.detach()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst_error(modules, reference) -> float:
    """Over all parameters: error norm / max(norm, 1e-3 x the norm of the module's gradient)."""
    worst = 0.0
    for name, module in reference.items():
        whole = nn.utils.get_total_norm([p.grad for p in module.parameters()])
        for (fqn, p), (other, q) in zip(module.named_parameters(), modules[name].named_parameters(), strict=True):
            assert fqn == other
            error = (full(q.grad) - p.grad).norm() / max(p.grad.norm(), 1e-3 * whole)
            worst = max(worst, float(error))
    return worst


def parity(rank: int, dp: int, tp: int, kinds, llm, fault: str | None = None) -> tuple[float, float]:
    """Errors of loss and gradients of a (dp, tp) mesh against one process; lanes take contiguous samples."""
    adapters = recipe(**llm)
    pairs = samples(adapters, kinds)
    reference = {name: build_module(a, name, 7, torch.float64) for name, a in adapters.items()}
    expected = run(adapters, reference, pairs)
    spec = MeshSpec.make(range(dp * tp), dp_replicate=dp, tp=tp)
    mesh = device_mesh(spec)
    assert mesh is not None
    modules = {name: build_module(a, name, 7, torch.float64) for name, a in adapters.items()}
    parallel = {name: parallelize(adapters[name], m, spec, mesh) for name, m in modules.items()}
    lane = spec.coordinate(rank)[0]
    loss = run(adapters, modules, pairs[lane * len(pairs) // dp : (lane + 1) * len(pairs) // dp])
    dist.all_reduce(loss, group=mesh.get_group("dp_replicate"))
    for each in parallel.values():
        if fault == "partial gradients not summed":
            each = replace(each, axes={n: replace(a, summed=without_tp(a.summed)) for n, a in each.axes.items()})
        if fault != "lanes not summed":
            Reduction(each)()()
    return float((loss - expected).abs() / expected), worst_error(modules, reference)


def without_tp(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != "tp")


READ = ("read", "read", "add", "sum")


@pytest.mark.parametrize(
    "llm", [{}, {"tie_word_embeddings": True, "attention_bias": True}], ids=["qwen3", "tied, bias"]
)
@pytest.mark.parametrize(
    ("dp", "tp"), [(1, 4), (2, 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((1, 2), (4, 1)))]
)
def test_gradients_equal_those_of_one_process(pool, dp, tp, llm):
    for loss_error, gradient_error in pool(dp * tp).run(parity, dp, tp, READ, llm):
        assert loss_error < 1e-12
        assert gradient_error < 1e-10


@pytest.mark.parametrize(
    "kinds",
    [("add", "add", "read"), ("read",), ("add",), ()],
    ids=["text-only lane", "empty lane", "no image at all", "no sample at all"],
)
def test_u1_u2_lanes_without_images_or_samples(pool, kinds):
    for loss_error, gradient_error in pool(4).run(parity, 2, 2, kinds, {}):
        assert not loss_error >= 1e-12  # no sample: 0 / 0
        assert not gradient_error >= 1e-10


@pytest.mark.parametrize("fault", ["partial gradients not summed", "lanes not summed"])
def test_the_comparison_sees_faults(pool, fault):
    assert max(error for _, error in pool(4).run(parity, 2, 2, READ, {}, fault)) > 1e-2


def frozen(rank: int):
    """Freezing survives sharding; only the input gradient flows."""
    adapters = recipe()
    modules = {name: build_module(a, name, 7, torch.float64) for name, a in adapters.items()}
    modules["llm"].requires_grad_(False)
    reference = copy.deepcopy(modules)
    pairs = samples(adapters, READ)
    run(adapters, reference, pairs)
    spec = MeshSpec.make(range(2), tp=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for each in [parallelize(adapters[name], m, spec, mesh) for name, m in modules.items()]:
        if each.module is modules["llm"]:
            Reduction(each)()()
    run(adapters, modules, pairs)
    assert all(p.grad is None and not p.requires_grad for p in modules["llm"].parameters())
    del modules["llm"], reference["llm"]
    return worst_error(modules, reference)


def test_a_frozen_llm_passes_gradients_on(pool):
    assert max(pool(2).run(frozen)) < 1e-10


def layout_facts(rank: int):
    """Shapes, memory and replicas of the shards of one module."""
    adapters = recipe()
    module = build_module(adapters["llm"], "llm", 0)
    elements = {name: p.numel() for name, p in module.named_parameters()}
    spec = MeshSpec.make(range(4), dp_replicate=2, tp=2)
    mesh = device_mesh(spec)
    assert mesh is not None
    partial = apply_tensor_parallel(module, mesh["tp"], adapters["llm"].tensor_parallel_plan())
    axes = gradient_axes(dict(module.named_parameters()), spec, partial)
    held = {n: local_part(p).numel() * axes[n].is_first_replica(spec, rank) for n, p in module.named_parameters()}
    storage = sum(local_part(p).untyped_storage().nbytes() for p in module.parameters())
    return elements, held, storage, sum(4 * local_part(p).numel() for p in module.parameters()), partial


def test_first_replicas_count_every_element_once_and_shards_free_the_rest(pool):
    results = pool(4).run(layout_facts)
    elements = results[0][0]
    for name, count in elements.items():
        assert sum(held[name] for _, held, *_ in results) == count
    for *_, storage, needed, partial in results:
        assert storage == needed
        assert set(partial) == {n for n in elements if n.endswith(("q_norm.weight", "k_norm.weight"))}


def all_reduces(rank: int):
    """Collectives of one forward and backward."""
    adapters = recipe()
    modules = {name: build_module(a, name, 7) for name, a in adapters.items()}
    spec = MeshSpec.make(range(2), tp=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for name, module in modules.items():
        parallelize(adapters[name], module, spec, mesh)
    counts = {"all_reduce": 0, "all_gather": 0}
    originals = {name: getattr(dist, name) for name in counts}

    def counting(name):
        def call(*args, **kwargs):
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in counts:
            setattr(dist, name, counting(name))
        run(adapters, modules, samples(adapters, READ))
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return counts


def test_two_sums_per_block_and_direction(pool):
    """Two blocks in each tower: attention and MLP, forward and backward; the projector's input and the head's."""
    (counts, _) = pool(2).run(all_reduces)
    assert counts == {"all_reduce": 2 * 2 * 2 * 2 + 2 + 1, "all_gather": 1}
