"""Recipe modules -> adapters: widths across boundaries, and one clear error per kind of mistake."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.graph.topology import BoundarySpec
from hetmesh.models import build_module, make_adapters

VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
LLM = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES = {"image": (1, 8, 8), "sketch": (1, 8, 8)}


@dataclass(frozen=True)
class Module:
    model: str
    config: dict[str, Any] = field(default_factory=dict)


class Patches(nn.Module):
    """A user's encoder."""

    rows_per_item = 4
    tensor_parallel_plan = {"embed": "colwise"}  # noqa: RUF012
    layers = ("embed",)

    def __init__(self, width: int, media_shape: tuple[int, ...]):
        super().__init__()
        self.out_features = width
        self.embed = nn.Linear(media_shape[-1] * media_shape[-2] // 4, width)

    def forward(self, media):
        return self.embed(media.reshape(media.shape[0], 4, -1))


class Widen(nn.Module):
    """A user's projector."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, rows):
        return self.linear(rows)


class WrongWidth(Widen):
    def forward(self, rows):
        return rows


class Bag(nn.Module):
    """A user's LLM: the mean of everything."""

    def __init__(self, vocab_size: int, in_features: int = 16):
        super().__init__()
        self.in_features = in_features
        self.embed = nn.Embedding(vocab_size, in_features)
        self.head = nn.Linear(in_features, vocab_size)

    def forward(self, batch, inputs):
        hidden = self.embed(batch["input_ids"]).flatten(0, 1)
        for rows in inputs.values():
            hidden = hidden.index_copy(0, batch["positions.image"], rows)
        return self.head(hidden[batch["target_positions"]])


NEEDS_VALUES = None


class Stubborn(nn.Module):
    def __init__(self):
        raise ValueError("not today")


def path(name: str) -> str:
    return f"{__name__}:{name}"


def make(vision=None, projector=None, llm=None, boundaries=None, **more):
    modules = {
        "vision": vision or Module("siglip", VISION),
        "projector": projector or Module("mlp"),
        "llm": llm or Module("qwen3", LLM),
        **more,
    }
    boundaries = boundaries or [BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm", "image")]
    media = {"vision": "image", "drawing": "stroke"}
    return make_adapters(modules, boundaries, media, vocab_size=23, media_shapes=SHAPES)


def test_sizes_follow_from_the_neighbours_and_the_data():
    adapters: Any = make()
    assert list(adapters) == ["vision", "projector", "llm"]
    assert (adapters["projector"].in_features, adapters["projector"].out_features) == (16, 24)
    assert adapters["vision"].media == "image"
    assert adapters["vision"].item_rows((1, 8, 8)) == 4
    assert adapters["vision"].config.intermediate_size == 64
    assert adapters["llm"].config.vocab_size == 23
    assert adapters["llm"].config.head_dim == 6
    assert adapters["llm"].layers() == ("model.embed_tokens", "model.layers.0", "model.norm", "lm_head")
    assert adapters["llm"].tensor_parallel_sizes() == {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_chain_of_projectors_resolves_from_both_ends():
    boundaries = [
        BoundarySpec("vision", "narrow"),
        BoundarySpec("narrow", "projector"),
        BoundarySpec("projector", "llm", "image"),
    ]
    adapters = make(boundaries=boundaries, narrow=Module("mlp", {"out_features": 8}))
    assert [(adapters[n].in_features, adapters[n].out_features) for n in ("narrow", "projector")] == [(16, 8), (8, 24)]
    with pytest.raises(RecipeError, match=r"modules\.projector: its row widths follow from neither side"):
        make(boundaries=boundaries, narrow=Module("mlp"))


def test_two_encoders_and_one_encoder_with_two_consumers():
    boundaries = [
        BoundarySpec("vision", "projector"),
        BoundarySpec("vision", "second"),
        BoundarySpec("drawing", "third"),
        BoundarySpec("projector", "llm", "image"),
        BoundarySpec("second", "llm", "sketch"),
        BoundarySpec("third", "llm", "stroke"),
    ]
    more = {"second": Module("mlp"), "third": Module("mlp"), "drawing": Module("siglip", {**VISION, "image_size": 4})}
    adapters: Any = make(boundaries=boundaries, **more)
    assert adapters["llm"].sources == {"projector": "image", "second": "sketch", "third": "stroke"}
    assert adapters["drawing"].media == "stroke"


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"vision": Module("siglop", VISION)},
            r"modules\.vision\.model: unknown model 'siglop'; did you mean 'siglip'",
        ),
        (
            {"vision": Module("x")},
            r"unknown model 'x'\. Valid are: clip, diffusers, diffusers_vae, flow, hf_encoder, hf_llm, hf_projector, "
            r"llama, mlp, qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_vl_moe_text, qwen3_vl_text, "
            r"qwen3_vl_vision, siglip, whisper, "
            r"package\.module:Class$",
        ),
        (
            {"vision": Module("siglip", {"hiden_size": 4})},
            r"config\.hiden_size: unknown key; did you mean 'hidden_size'",
        ),
        ({"vision": Module("siglip", {"zzz": 4})}, r"config\.zzz: unknown key; valid keys are \['attention_dropout'"),
        (
            {"vision": Module("siglip", {**VISION, "hidden_act": 3})},
            r"modules\.vision\.config\.hidden_act = 3: must be str$",
        ),
        (
            {"vision": Module("siglip", {**VISION, "hidden_size": "64"})},
            r"config\.hidden_size: must be a positive integer",
        ),
        (
            {"vision": Module("siglip", {**VISION, "hidden_act": "gulu"})},
            r"'gulu': transformers knows .* mean 'gelu'\?",
        ),
        ({"vision": Module("siglip", {**VISION, "attention_dropout": 1})}, r"_dropout = 1: must be .* less than 1$"),
        ({"llm": Module("qwen3", {**LLM, "rope_parameters": 3})}, r"rope_parameters = 3: must be .* dict "),
        ({"llm": Module("llama", {**LLM, "num_attention_heads": 5})}, r"modules\.llm\.config: The hidden size \(24\)"),
        ({"llm": Module("qwen3_moe", {**LLM, "num_experts_per_tok": True})}, r"_tok = True: must be int$"),
        ({"llm": Module("qwen3_moe", {**LLM, "mlp_only_layers": [True]})}, r"\[True\]: must be list\[int\] "),
        (
            {"llm": Module("qwen3_moe", {**LLM, "decoder_sparse_step": 2})},
            r"decoder_sparse_step = 2: the interval between layers with experts; valid are 1 \(all\) to num_hidden",
        ),
        (
            {"llm": Module("qwen3_moe", {**LLM, "output_router_logits": False})},
            r"output_router_logits = False: router logits are never returned; set router_aux_loss_coef",
        ),
        ({"vision": Module("siglip", {**VISION, "num_attention_heads": 5})}, r"must divide hidden_size = 16, got 5"),
        (
            {"vision": Module("siglip", {**VISION, "patch_size": 9})},
            r"config\.patch_size: must be at most image_size = 8",
        ),
        ({"llm": Module("qwen3", {**LLM, "vocab_size": 9})}, r"must be at least the data source's 23, got 9"),
        ({"llm": Module("qwen3", {**LLM, "num_key_value_heads": 3})}, r"must divide num_attention_heads = 4, got 3"),
        ({"llm": Module("qwen3", {**LLM, "head_dim": 7})}, r"modules\.llm\.config: .*even rotary dim"),
        (
            {"llm": Module("qwen3", {**LLM, "head_dim": 7, "rope_parameters": PARTIAL})},
            r"modules\.llm\.config\.head_dim: must be even \(rotary positions\), got 7",
        ),
        (
            {"projector": Module("mlp", {"out_features": 9})},
            r"boundary projector->llm: 'projector' emits rows of width 9",
        ),
        ({"projector": Module("mlp", {"width": 9})}, r"modules\.projector\.config\.width: unknown key"),
        ({"projector": Module("qwen3", LLM)}, r"an LLM emits logits, not rows, but 'llm' consumes it"),
        ({"vision": Module("mlp")}, r"mlp maps rows to rows, so it needs exactly one boundary into it \(has 0\)"),
        ({"projector": Module("siglip", VISION)}, r"siglip reads media and emits rows"),
        ({"vision": Module("no_such_package:X")}, r"modules\.vision\.model: cannot import 'no_such_package:X'"),
        ({"vision": Module(path("NEEDS_VALUES"))}, "is not a subclass of torch.nn.Module"),
        ({"vision": Module(path("Stubborn"))}, r"Stubborn\(\) failed: not today"),
        ({"vision": Module(path("Patches"))}, r"the constructor of Patches also needs \['width'\]"),
        ({"vision": Module(path("Patches"), {"with": 3})}, r"config\.with: unknown key; did you mean 'width'"),
        (
            {"projector": Module(path("Patches"), {"width": 3, "media_shape": [1, 8, 8]})},
            r"emits rows of width 3",
        ),
        ({"projector": Module("torch.nn:GELU")}, r"modules\.projector\.config\.out_features: missing"),
        ({"vision": Module("torch.nn:Flatten")}, r"modules\.vision\.config\.out_features: missing"),
    ],
)
def test_recipe_errors(change, message):
    with pytest.raises(RecipeError, match=message):
        make(**change)


def test_the_users_own_modules():
    adapters: Any = make(
        Module(path("Patches"), {"width": 16}),
        Module(path("Widen"), {"bias": False}),
        Module(path("Bag"), {"in_features": 20}),
    )
    encoder, projector, sink = adapters.values()
    assert encoder.arguments == {"width": 16, "media_shape": (1, 8, 8)}
    assert (encoder.layers(), encoder.tensor_parallel_plan()) == (("embed",), {"embed": "colwise"})
    assert projector.arguments == {"in_features": 16, "out_features": 20, "bias": False}
    assert projector.layers() == ("linear",)
    assert sink.arguments == {"vocab_size": 23, "in_features": 20}
    vision, widen = (build_module(a, "m", 0) for a in (encoder, projector))
    for n in (3, 0):
        rows = projector.forward(widen, {}, {"vision": encoder.forward(vision, {"media": torch.ones(n, 1, 8, 8)}, {})})
        assert rows.shape == (4 * n, 20)
        gradients = torch.autograd.grad(rows.sum(), [*vision.parameters(), *widen.parameters()])
        assert all(bool(g.any()) == bool(n) for g in gradients)


def test_a_module_that_returns_the_wrong_shape_is_named():
    with pytest.raises(RecipeError, match=r"modules.projector: .* must return shape \(3, 24\), got \(3, 16\)"):
        make(projector=Module(path("WrongWidth")))


def test_weights_depend_on_seed_and_name_only():
    adapter = make()["vision"]
    state = torch.get_rng_state()
    weights = [
        nn.utils.parameters_to_vector(build_module(adapter, *key).parameters())
        for key in (("a", 0), ("a", 0), ("b", 0), ("a", 1))
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
    double = nn.utils.parameters_to_vector(build_module(adapter, "a", 0, torch.float64).parameters())
    assert double.dtype == torch.float64
    assert torch.equal(double.float(), weights[0])
    assert re.match("torch.float32", str(torch.get_default_dtype()))


def mixture(**config):
    sizes = {**LLM, "num_experts": 4, "num_experts_per_tok": 2, **config}
    return make_adapters({"llm": Module("qwen3_moe", sizes)}, [], {}, vocab_size=16)["llm"]


def test_an_integer_is_as_good_as_a_float():
    assert mixture(router_aux_loss_coef=0, rms_norm_eps=1).config.rms_norm_eps == 1.0
    with pytest.raises(RecipeError, match="router_aux_loss_coef"):
        mixture(router_aux_loss_coef=True)


def test_dense_layers_that_a_mixture_does_not_have_are_refused():
    with pytest.raises(RecipeError, match=r"mlp_only_layers: layers \[1\] do not exist; valid are 0 to 0"):
        mixture(mlp_only_layers=[0, 1])
