"""Qwen3-VL-MoE's LLM in one process: against transformers' own text model, and what its recipe may say."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.models import MODELS
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.named.qwen3_vl_text import Qwen3VLMoeTextAdapter
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.testing.precision import exact_dtypes
from support import tiny_vlms

CONFIG = {
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 6,
    "initializer_range": 0.3,
}


def adapter(**config):
    request = AdapterRequest("llm", {**CONFIG, **config}, vocab_size=50, placeholders={"vision": "image"})
    return MODELS["qwen3_vl_moe_text"](request)


def batch(generator):
    """Two samples of different lengths, the shorter one padded; images of the first are at 2-5, of the second at 1."""
    ids = torch.randint(0, 50, (2, 9), generator=generator)
    positions = torch.arange(9).expand(3, 2, 9).clone()
    positions[1:, 0, 2:6] += torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
    at = torch.tensor([2, 3, 4, 5, 10])
    targets = torch.tensor([0, 6, 7, 11, 12])
    return {"input_ids": ids, "position_ids": positions, "positions.image": at, "target_positions": targets}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.0), (torch.float64, 1e-12)])
def test_it_equals_transformers_own_text_model(dtype, bound):
    """Logits and every gradient, with rows at placeholders and features behind two layers."""
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

    own, generator = adapter(), torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    module = own.build().to(dtype)
    theirs, head = Qwen3VLMoeTextModel(own.config).to(dtype), module.lm_head
    state = {
        name: p.flatten(1, 2) if name.endswith("gate_up_proj") else p for name, p in module.model.state_dict().items()
    }
    theirs.load_state_dict(state)
    given = batch(generator)
    rows, *deepstack = (torch.randn(5, 12, generator=generator, dtype=dtype) for _ in range(3))
    inputs = {"vision": rows, **{f"vision.deepstack.{i}": each for i, each in enumerate(deepstack)}}
    mask = torch.zeros(18, dtype=torch.bool).index_fill(0, given["positions.image"], True)
    with exact_dtypes(module, theirs):
        ours = own.forward(module, given, inputs)
        embedded = theirs.embed_tokens(given["input_ids"]).flatten(0, 1).index_copy(0, given["positions.image"], rows)
        hidden = theirs(
            inputs_embeds=embedded.view(2, 9, 12),
            position_ids=given["position_ids"],
            visual_pos_masks=mask.view(2, 9),
            deepstack_visual_embeds=deepstack,
            use_cache=False,
        ).last_hidden_state
        expected = nn.functional.linear(hidden.flatten(0, 1)[given["target_positions"]], head.weight)
        for logits in (ours, expected):
            logits.sin().sum().backward()
    assert (ours - expected).abs().max() <= bound * expected.abs().max()
    found = dict(theirs.named_parameters())
    for name, p in module.model.named_parameters():
        other = found[name].grad.view_as(p)
        assert (p.grad - other).abs().max() <= bound * other.abs().max(), name


def test_what_it_is_composed_of():
    own = adapter(router_aux_loss_coef=0.25)
    assert isinstance(own, Qwen3VLMoeTextAdapter)
    assert (own.abilities.experts.count, own.abilities.experts.balance) == (8, 0.25)
    assert own.abilities.layer_of_output("deepstack.1") == "model.layers.1"
    assert own.abilities.position_ids is not None
    plan = own.tensor_parallel_plan()
    assert not any(".mlp." in pattern for pattern in plan)
    assert "lm_head" in plan
    assert own.tensor_parallel_sizes()["moe_intermediate_size"] == 6


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok = 9: a token cannot have more experts"),
        ({"norm_topk_prob": False}, r"config\.norm_topk_prob: unknown key"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}}, r"must add up to head_dim / 2 = 4"),
    ],
)
def test_what_does_not_fit_is_refused(config, said):
    with pytest.raises(RecipeError, match=said):
        adapter(**config)


def test_the_hub_s_transposed_experts_are_read_as_those_that_transformers_saves(tmp_path):
    adapters = []
    for name, turn in (("hub", True), ("saved", False)):
        path = tiny_vlms.save("qwen3_vl_moe", tmp_path / name)
        if turn:
            held = load_file(path / "model.safetensors")
            held = {n: e.transpose(1, 2).contiguous() if ".experts." in n else e for n, e in held.items()}
            save_file(held, path / "model.safetensors", metadata={"format": "pt"})
        pretrained = Pretrained(path, "llm.initial_load_path")
        request = AdapterRequest("llm", placeholders={"vision": "image"}, pretrained=pretrained)
        adapters.append((MODELS["qwen3_vl_moe_text"](request), pretrained))
    hub, saved = (adapter.read_forms(pretrained) for adapter, pretrained in adapters)
    assert {n: form.shape for n, form in hub.items()} == {n: form.shape for n, form in saved.items()}
    turned = {name for name, form in hub.items() if not form.is_whole}
    assert turned == {name for name in hub if ".mlp.experts." in name}
    assert all(form.is_whole for form in saved.values())
