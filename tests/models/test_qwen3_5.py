"""Qwen3.5's LLMs by tables of sizes are the LLM halves of directories, which other tests compare with transformers."""

import pytest
import torch

from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.packed_rows import PackedRows
from hetmesh.context import causal, join
from hetmesh.errors import RecipeError
from hetmesh.models import MODELS
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.weights.build import build_empty
from hetmesh.models.weights.load import load_weights
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.testing.precision import exact_dtypes
from support import tiny_vlms

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
INSIDE = "model.language_model."


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_they_are_the_llms_of_directories(tmp_path, name):
    """The plan of tensor parallelism, its sizes, what becomes of weights, and logits of samples in one row."""
    pretrained = Pretrained(tiny_vlms.save(name, tmp_path), "llm.initial_load_path")
    given = {"placeholders": {"vision": "image"}, "pretrained": pretrained, "packed": True}
    half, own = (MODELS[model](AdapterRequest("llm", model=model, **given)) for model in ("hf_llm", f"{name}_text"))
    plan = {pattern.replace(INSIDE, "model."): style for pattern, style in half.tensor_parallel_plan().items()}
    assert own.tensor_parallel_plan() == plan
    assert own.tensor_parallel_sizes() == half.tensor_parallel_sizes()
    assert own.abilities.reasons == half.abilities.reasons
    generator, lengths, logits = torch.Generator().manual_seed(0), (9, 70, 2), []
    tensors = {
        "input_ids": torch.randint(50, 500, (1, 81), generator=generator),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).expand(3, 1, -1),
        "positions.image": torch.tensor([2, 3, 30]),
        "target_positions": torch.arange(81),
    }
    batch = PackedRows(tensors, ContextAttention(join(map(causal, lengths)), name="llm attention"))
    rows = torch.randn(3, 24, generator=generator, dtype=torch.float64)
    for adapter in (half, own):
        module = build_empty(adapter, torch.float64)
        load_weights(adapter, module, pretrained)
        adapter.use_packed(module)
        with exact_dtypes(module, every_cast=True), torch.no_grad():
            logits.append(adapter.forward(module, batch, {"vision": rows}))
    assert (logits[0] - logits[1]).abs().max() < 1e-12 * logits[0].abs().max()


def test_keys_that_are_not_given():
    own = MODELS["qwen3_5_moe_text"](AdapterRequest("llm", config={**SIZES, **EXPERTS}, vocab_size=50))
    assert own.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert own.config.shared_expert_intermediate_size == 8
    assert own.config.rope_parameters["mrope_section"] == [2, 1, 1]
    assert len(own.abilities.experts.blocks) == 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 2}, r"layer_types: 'linear_attention' or 'full_attention' for each of .* = 2, and both"),
        ({"layer_types": ["linear_attention", "conv"] * 2}, r"layer_types: .* got \['linear_attention', 'conv'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, r"head_dim / 2 x .* = 0.25 = 4, got \[24"),
    ],
)
def test_what_does_not_fit_is_refused(config, said):
    with pytest.raises(RecipeError, match=said):
        MODELS["qwen3_5_text"](AdapterRequest("llm", config={**SIZES, **config}, vocab_size=50))
