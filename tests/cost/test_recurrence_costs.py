"""What layers cost that remember earlier tokens otherwise than by attention, against what transformers' own compute and
autograd keeps of them."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hetmesh._torch_compat import fake_process_group
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.mixers import mixers, use_in_mixer
from hetmesh.attention.recurrence import shared_delta_rule
from hetmesh.boundary import World
from hetmesh.context import causal, join
from hetmesh.cost import LayerOptions, Rates, Work, activation_bytes, layer_flops, layer_time
from hetmesh.cost.recurrence import Recurrence
from hetmesh.models.adapter import Abilities
from hetmesh.models.module_shape import module_shape
from hetmesh.parallel import apply_tensor_parallel
from hetmesh.parallel.gradient_sums import local_part
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from support import tiny_vlms

ROWS = 512
WIDER = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128}
WIDER |= {"linear_value_head_dim": 128, "intermediate_size": 1024}
"""Heads of Qwen3.5-9B, a quarter of them."""
FAMILIES = {
    "qwen3_5": tiny_vlms.MODELS["qwen3_5"],
    "wide": lambda: tiny_vlms._qwen3_5(**WIDER),
    "mamba": tiny_vlms.mamba,
    "lfm2": lambda: tiny_vlms._llava(
        text={"model_type": "lfm2", **tiny_vlms.TEXT, "layer_types": ["conv", "full_attention", "conv"]}
    ),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """The adapter and the shape of the LLM of a family."""
    known = {}

    def of(name):
        if name not in known:
            family = "qwen3_5" if name == "wide" else name
            with patch.object(tiny_vlms, "MODELS", {**tiny_vlms.MODELS, family: FAMILIES[name]}):
                path = tiny_vlms.save(family, tmp_path_factory.mktemp(name))
            run = resolve(parse_recipe(tiny_vlms.recipe_text(path).replace("float64", "float32")))
            known[name] = run.adapters["llm"], run.shapes["llm"]
        return known[name]

    return of


def block_of(adapter, layer, dtype=torch.float32):
    """A layer without memory, and what calls it."""
    with torch.device("meta"):
        block = adapter.build().to(dtype).get_submodule(layer.name)
        x = torch.empty(1, ROWS, adapter.config.hidden_size, dtype=dtype, requires_grad=True)
        angles = torch.empty(1, ROWS, 12, dtype=dtype)
    return block, x, {"position_embeddings": (angles, angles), "attention_mask": None}


@pytest.mark.parametrize(("name", "rel"), [("qwen3_5", 1e-3), ("lfm2", 1e-3), ("mamba", 0.1)])
def test_forward_flops_are_those_that_transformers_computes(llm, name, rel):
    """But for the triangular systems, which torch's counter leaves out. Mamba-2 there multiplies the states of all
    pairs of chunks."""
    adapter, shape = llm(name)
    layer = next(layer for layer in shape.layers if layer.recurrences)
    block, x, given = block_of(adapter, layer)
    with FlopCounterMode(display=False) as counter:
        block(x, **given)
    systems = sum(r.delta_rule * r.heads * r.chunk * (r.key_width + r.value_width) for r in layer.recurrences)
    flops = layer_flops(layer, Work(ROWS, ROWS**2), upstream=True)
    assert flops.forward - systems * ROWS == pytest.approx(counter.get_total_flops(), rel=rel)
    assert flops.backward == 2 * flops.forward


def test_a_gate_beside_queries_is_no_attention(llm):
    adapter, shape = llm("qwen3_5")
    layer = next(layer for layer in shape.layers if layer.attention_width)
    block, x, given = block_of(adapter, layer)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        block(x, **given)
    flops = layer_flops(layer, Work(ROWS, ROWS**2), upstream=True)
    assert flops.forward == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_mixers_count_no_attention_and_projections_once(llm):
    """Even where they have a `q_proj`, and although what leaves a mixer is registered before what enters it."""
    _, shape = llm("qwen3_5")
    layer = next(layer for layer in shape.layers if layer.recurrences)
    (recurrence,) = layer.recurrences
    assert recurrence == Recurrence(4, 2, 6, 6, True, 64, 48, 4)
    assert (layer.attention_width, layer.key_width, layer.causal) == (0, 0, False)
    parts = [weight.name.split(".")[-2] for weight in layer.weights if weight.per_row and "linear_attn" in weight.name]
    assert parts == ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "out_proj"]


def test_two_ranks_compute_half_of_a_recurrence_that_is_split_by_heads(llm):
    """And keep all of the fused projection, and of what lies behind it."""
    rates, work = Rates(1.0), Work(ROWS)
    for name, split in (("qwen3_5", True), ("mamba", False)):
        layer = next(layer for layer in llm(name)[1].layers if layer.recurrences)
        whole, half = (layer_time(layer, work, rates, upstream=True, tp=tp).forward for tp in (1, 2))
        mlp = 2 * ROWS * sum(w.multiplied for w in layer.weights if "mlp" in w.name and w.tp_dim is not None)
        assert half == (whole / 2 if split else whole - mlp / 2)
        held = {weight.name.split(".")[-2] for weight in layer.weights if weight.own_rows}
        assert held == ({"in_proj_qkv", "conv1d", "linear_attn"} if split else set())


class Saved:
    """A tensor that autograd keeps as long as it may need it."""

    def __init__(self, tensor):
        self.tensor = tensor


def saved_bytes(parameters, run):
    """Bytes that autograd keeps for the backward of what `run` returns, on any device."""
    own, saved = {p.untyped_storage()._cdata for p in parameters}, weakref.WeakSet()

    def pack(tensor):
        kept = Saved(tensor)
        saved.add(kept)
        return kept

    with saved_tensors_hooks(pack, lambda kept: kept.tensor):
        out = run()
    storages = (kept.tensor.untyped_storage() for kept in saved if kept.tensor.is_floating_point())
    sizes = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in own}
    del out
    return sum(sizes.values())


KEPT = [("qwen3_5", 1, {}), ("wide", 1, {}), ("wide", 2, {}), ("lfm2", 1, {}), ("mamba", 1, {"rel": 0.11})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "tp", "near"), KEPT)
def test_a_layer_keeps_what_autograd_saves(llm, monkeypatch, name, tp, near, dtype):
    """Of samples in one row, without memory: states per chunk and inputs of convolutions among it."""
    own = torch.autocast  # which tensors without memory do not know
    monkeypatch.setattr(torch, "autocast", lambda kind, **how: nullcontext() if kind == "meta" else own(kind, **how))
    adapter, shape = llm(name)
    layer = next(layer for layer in shape.layers if layer.recurrences)
    with fake_process_group(tp), World().as_current():
        with torch.device("meta"):
            module = adapter.build().to(dtype)
            x = torch.empty(1, ROWS, adapter.config.hidden_size, dtype=dtype, requires_grad=True)
        if tp > 1:
            apply_tensor_parallel(module, init_device_mesh("cpu", (tp,)), adapter.tensor_parallel_plan())
        block = module.get_submodule(layer.name)
        for mixer in mixers(block):
            use_in_mixer(mixer, padded=name == "mamba")
        state = ContextAttention(join([causal(ROWS // 2)] * 2), name="llm attention")
        given = {"attention_mask": None, "position_embeddings": None, "attention_state": state}
        saved = saved_bytes(map(local_part, block.parameters()), lambda: block(x, **given))
    how = LayerOptions(str(dtype).removeprefix("torch."), True, group=tuple(range(tp)))
    assert activation_bytes(layer, Work(ROWS), how) == pytest.approx(saved, **{"rel": 0.02, **near})


def test_a_layer_of_real_size_keeps_what_autograd_saves(monkeypatch):
    """Qwen3.5-9B's, in bfloat16 and without memory."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextConfig, Qwen3_5TextModel

    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    sizes = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    config = Qwen3_5TextConfig(**sizes, **heads, linear_value_head_dim=128, layer_types=["linear_attention"])
    with fake_process_group(1), World().as_current():
        with torch.device("meta"):
            decoder = Qwen3_5TextModel(config).bfloat16()
            x = torch.empty(1, ROWS, 4096, dtype=torch.bfloat16, requires_grad=True)
        abilities = Abilities(token_gathered=("layers.*.linear_attn",))
        adapter = SimpleNamespace(abilities=abilities, out_features=None, layers=lambda: ("layers.0",))
        layer = next(layer for layer in module_shape("llm", adapter, decoder, {}).layers if layer.recurrences)
        use_in_mixer(decoder.layers[0].linear_attn, padded=False)
        state = ContextAttention(join([causal(ROWS // 2)] * 2), name="llm attention")
        given = {"attention_mask": None, "position_embeddings": None, "attention_state": state}
        saved = saved_bytes(decoder.parameters(), lambda: decoder.layers[0](x, **given))
    assert activation_bytes(layer, Work(ROWS), LayerOptions("bfloat16", True)) == pytest.approx(saved, rel=0.02)
    assert saved > 300_000 * ROWS


def test_pieces_before_cuts_keep_their_maps():
    """Of a sample that is cut in the middle, on the first of two ranks."""
    recurrence = Recurrence(8, 4, 32, 64, True)
    inputs = [torch.zeros(ROWS, *shape, requires_grad=True) for shape in ((4, 32), (4, 32), (8, 64), (8,), (8,))]
    with fake_process_group(2), World().as_current():
        kept = []
        for shares in ([((0, ROWS),), ()], [((0, ROWS),), ((ROWS, 2 * ROWS),)]):
            mask = join([causal(sum(b - a for runs in shares for a, b in runs))])
            state = ContextAttention(mask, tuple(shares), (0, 1), name="llm attention")
            kept.append(saved_bytes(inputs, lambda state=state: shared_delta_rule(*inputs, state, True)))
    assert kept[1] - kept[0] == pytest.approx(recurrence.map_bytes(4) * ROWS, rel=0.05)
