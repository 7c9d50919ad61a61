"""FLOPs against torch's FlopCounterMode, which counts what runs."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hetmesh.cost import Flops, LayerShape, ModuleShape, WeightShape, Work, layer_flops, module_flops
from hetmesh.models import AdapterRequest
from hetmesh.models.module_shape import module_shape
from hetmesh.models.named.mlp import MlpAdapter
from hetmesh.models.named.qwen3 import Qwen3Adapter
from hetmesh.models.named.qwen3_moe import Qwen3MoeAdapter
from hetmesh.models.named.qwen3_vl_vision import Qwen3VLVisionAdapter
from hetmesh.models.named.siglip import SiglipAdapter

MLP = MlpAdapter(24, 40, 16, 16)
VISION = SiglipAdapter.make(
    AdapterRequest(
        "vision",
        {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 4, "image_size": 32},
        media="image",
        consumers=("llm",),
    )
)


def llm(**config):
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3Adapter.make(AdapterRequest("llm", {**sizes, "head_dim": 24, **config}, vocab_size=90))


def count(module, run, inputs=()):
    """FLOPs of the forward and of the backward, as they run. (The counter does not know the CPU's fused attention.)"""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = run()
    forward = counter.get_total_flops()
    wanted = [p for p in (*module.parameters(), *inputs) if p.requires_grad]
    with FlopCounterMode(display=False) as counter:
        if wanted:
            output.sum().backward()
    return forward, counter.get_total_flops()


def run_llm(adapter, module, lengths, targets, rows=None):
    batch, width = len(lengths), max(lengths)
    given = {
        "input_ids": torch.randint(5, 90, (batch, width)),
        "position_ids": torch.arange(width).expand(batch, width),
        "target_positions": torch.randperm(batch * width)[:targets],
    }
    if rows is not None:
        adapter = dataclasses.replace(adapter, sources={"projector": "image"})
        given["positions.image"] = torch.arange(len(rows))
    return adapter.forward(module, given, {"projector": rows})


@pytest.mark.parametrize("tied", [False, True])
def test_llm(tied):
    adapter = llm(tie_word_embeddings=tied)
    module = adapter.build()
    shape = module_shape("llm", adapter, module)
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    work = Work(rows=3 * 40, pairs=3 * 40**2, targets=17)
    forward, backward = count(module, lambda: run_llm(adapter, module, [40] * 3, 17))
    expected = module_flops(shape, work, upstream=False)
    assert expected.forward == pytest.approx(forward, rel=0.01)
    assert expected.backward == pytest.approx(backward, rel=0.05)


def test_experts_cost_what_a_token_chooses():
    """Whichever these are: every second block has experts; float64, since the counter knows no grouped products."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    adapter = Qwen3MoeAdapter.make(AdapterRequest("llm", {**sizes, "decoder_sparse_step": 2}, vocab_size=90))
    module = adapter.build().double()
    shape = module_shape("llm", adapter, module)
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    assert sum(len(layer.expert_weights) for layer in shape.layers) == 2 * 2
    forward, backward = count(module, lambda: run_llm(adapter, module, [40] * 3, 17))
    expected = module_flops(shape, Work(rows=3 * 40, pairs=3 * 40**2, targets=17), upstream=False)
    assert expected.forward == pytest.approx(forward, rel=0.01)
    assert expected.backward == pytest.approx(backward, rel=0.05)
    assert {weight.inputs for layer in shape.layers for weight in layer.expert_weights} == {64, 40}


def test_the_head_counts_target_positions_only():
    adapter = llm()
    shape = module_shape("llm", adapter, adapter.build())
    few, many = (module_flops(shape, Work(100, 100, targets), upstream=False) for targets in (1, 11))
    assert many.total - few.total == 3 * 10 * 2 * 64 * 90  # with the gradients of its input and weight


def test_encoder():
    module = VISION.build()
    shape = module_shape("vision", VISION, module)
    forward, backward = count(module, lambda: VISION.forward(module, {"media": torch.randn(5, 3, 32, 32)}, {}))
    expected = module_flops(shape, Work(5 * 64, 5 * 64**2), upstream=False)
    assert expected.forward == pytest.approx(forward, rel=0.01)
    assert expected.backward == pytest.approx(backward, rel=0.05)


def test_blocks_of_a_tower_that_merges_patches_work_on_these():
    """Four patches to a row: so are blocks, while mergers work on rows; one `qkv` makes queries, keys and values."""
    sizes = {"hidden_size": 64, "depth": 2, "num_heads": 4, "patch_size": 2, "deepstack_visual_indexes": [0]}
    sizes |= {"temporal_patch_size": 1, "num_position_embeddings": 16, "out_hidden_size": 40}
    adapter = Qwen3VLVisionAdapter.make(AdapterRequest("vision", sizes, media="image", consumers=("llm",)))
    module = adapter.build()
    shape = module_shape("vision", adapter, module)
    rows = [adapter.item_rows(image) for image in ((3, 16, 8), (3, 16, 24))]
    grids = [adapter.item_grid(image) for image in ((3, 16, 8), (3, 16, 24))]
    batch = {"patches": torch.randn(4 * sum(rows), adapter.patch_features), **adapter._places(grids)}
    forward, backward = count(module, lambda: sum(out.sum() for out in adapter.forward(module, batch, {}).values()))
    expected = module_flops(shape, Work(sum(rows), sum(n * n for n in rows)), upstream=False)
    assert expected.forward == pytest.approx(forward, rel=0.01)
    assert expected.backward == pytest.approx(backward, rel=0.05)


def test_row_wise_module_with_and_without_a_trainable_producer():
    module = MLP.build()
    shape = module_shape("projector", MLP, module)
    for upstream in (False, True):
        rows = torch.randn(30, 24, requires_grad=upstream)
        forward, backward = count(module, lambda rows=rows: module(rows))
        expected = module_flops(shape, Work(30), upstream=upstream)
        assert (expected.forward, expected.backward) == (forward, backward)


def test_a_frozen_llm_behind_a_trainable_projector_costs_input_gradients_only():
    adapter = llm()
    module = adapter.build().requires_grad_(False)
    rows = torch.randn(6, 64, requires_grad=True)
    shape = module_shape("llm", adapter, module)
    work = Work(2 * 40, 2 * 40**2, 9)
    _, backward = count(module, lambda: run_llm(adapter, module, [40, 40], 9, rows), [rows])
    expected = module_flops(shape, work, upstream=True)
    assert expected.backward == pytest.approx(backward, rel=0.02)
    attention, head = 3 * 4 * 4 * 24 * work.pairs, 2 * (2 * 64 * 90) * work.targets  # whose backward is in its forward
    linears = expected.forward - attention - head
    assert expected.backward == linears + 2 * attention


def test_frozen_with_nothing_trainable_before_it_has_no_backward():
    module = VISION.build().requires_grad_(False)
    shape = module_shape("vision", VISION, module)
    assert module_flops(shape, Work(64, 64**2), upstream=False).backward == 0


def test_layers_become_upstream_of_later_ones():
    frozen, trained = (WeightShape(f"{t}", (3, 5), 1, t) for t in (False, True))
    layers = tuple(LayerShape(str(i), (w,)) for i, w in enumerate((frozen, trained, frozen, trained)))
    assert module_flops(ModuleShape("m", layers), Work(7), upstream=False) == Flops(4 * 210, (0 + 1 + 1 + 2) * 210)


def test_lookups_and_elementwise_weights_cost_nothing():
    layer = LayerShape("embedding", (WeightShape("e", (100, 8)), WeightShape("norm", (8,))))
    assert layer_flops(layer, Work(9, 81, 2), upstream=True) == Flops(0, 0)


def test_convolutions_before_the_last_run_more_often_than_once_per_row():
    whisper = pytest.importorskip("hetmesh.models.named.whisper").WhisperAdapter.make(
        AdapterRequest(
            "audio",
            {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "num_mel_bins": 16}
            | {"max_source_positions": 50},
            media="audio",
            consumers=("llm",),
        )
    )
    module = whisper.build()
    forward, _ = count(module, lambda: whisper.forward(module, {"media": torch.randn(2, 16, 100)}, {}))
    expected = module_flops(module_shape("audio", whisper, module), Work(100, 2 * 50**2), upstream=False)
    assert expected.forward == pytest.approx(forward, rel=0.01)
