"""Graphs for drawn recipes: tiny models of every kind, wired in every way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hypothesis import strategies as st

from support.recipe_draft import SINK, Draft, random_media, wire
from support.recipe_processors import processors
from support.recipe_user_graphs import directories, user_models


def siglip(draw: st.DrawFn, draft: Draft, name: str = "vision", *, channels: int = 1) -> None:
    """A SigLIP tower over images of 8x8 pixels: 4 rows each."""
    layers = draw(st.integers(1, 3))
    draft.table("modules")[name] = {
        "model": "siglip",
        "config": {
            "hidden_size": draw(st.sampled_from([8, 12])),
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "patch_size": 4,
            "image_size": 8,
            "num_channels": channels,
            "intermediate_size": draw(st.sampled_from([8, 10])),
        },
    }
    draft.heads[name] = 4
    draft.layers[name] = ("embeddings", *(f"encoder.layers.{i}" for i in range(layers)), "post_layernorm")


def clip(draw: st.DrawFn, draft: Draft, name: str = "vision") -> None:
    """A CLIP tower, with or without its class token's row, reading any of its blocks."""
    siglip(draw, draft, name)
    module = draft.table("modules", name)
    layers = module["config"]["num_hidden_layers"]
    feature = draw(st.integers(-layers, -1))
    module["model"] = "clip"
    module["config"] |= {"class_token": draw(st.booleans()), "feature_layer": feature}
    blocks = (f"encoder.layers.{i}" for i in range(layers + feature + 1))
    draft.layers[name] = ("embeddings", "pre_layrnorm", *blocks)


def whisper(draw: st.DrawFn, draft: Draft, name: str) -> None:
    """A Whisper encoder over 6 frames of 3 bins: 3 rows each. Its first three layers share a pipeline stage."""
    layers = draw(st.integers(1, 2))
    draft.table("modules")[name] = {
        "model": "whisper",
        "config": {"d_model": 8, "encoder_layers": layers, "encoder_attention_heads": 4, "encoder_ffn_dim": 10},
    }
    draft.heads[name] = 4
    draft.layers[name] = ("conv1", *(f"layers.{i}" for i in range(layers)), "layer_norm")


def mlp(draw: st.DrawFn, draft: Draft, name: str) -> None:
    """A projector, whose hidden width tensor parallelism need not divide."""
    config = draw(st.sampled_from([{}, {"hidden_features": 7}]))
    draft.table("modules")[name] = {"model": "mlp"} | ({"config": config} if config else {})
    draft.heads[name] = 4


def llm(draw: st.DrawFn, draft: Draft, *, width: int | None = None) -> None:
    """Qwen3 or Llama, with grouped queries or without, its head tied to the embedding or not."""
    layers = draw(st.integers(1, 4))
    model = draw(st.sampled_from(["qwen3", "llama"]))
    draft.table("modules")[SINK] = {
        "model": model,
        "config": {
            "hidden_size": width or draw(st.sampled_from([12, 16])),
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": draw(st.sampled_from([4, 2, 1])),
            "head_dim": 4,
            "intermediate_size": draw(st.sampled_from([16, 14])),
            "tie_word_embeddings": draw(st.booleans()),
        },
    }
    _decoder(draft)


def _decoder(draft: Draft) -> None:
    config = draft.tables["modules"][SINK]["config"]
    draft.heads[SINK] = config["num_attention_heads"]
    blocks = (f"model.layers.{i}" for i in range(config["num_hidden_layers"]))
    draft.layers[SINK] = ("model.embed_tokens", *blocks, "model.norm", "lm_head")


def digits(draw: st.DrawFn, draft: Draft) -> None:
    """The model of the digits recipes on their data: SigLIP, projector, Qwen3."""
    siglip(draw, draft)
    mlp(draw, draft, "projector")
    llm(draw, draft)
    draft.tables["modules"][SINK]["model"] = "qwen3"
    wire(draft, "vision", "projector", SINK, at="image")
    draft.tables["data"] = {
        "source": "digits",
        "options": {"max_images": draw(st.integers(1, 3)), "seed": draw(st.integers(0, 99))},
    }


def one_encoder(draw: st.DrawFn, draft: Draft) -> None:
    """An image tower and a projector, or a tower of the LLM's own width without one."""
    draw(st.sampled_from([siglip, clip]))(draw, draft)
    if draw(st.booleans()):
        mlp(draw, draft, "projector")
        llm(draw, draft)
        wire(draft, "vision", "projector", SINK, at="image")
    else:
        llm(draw, draft, width=draft.tables["modules"]["vision"]["config"]["hidden_size"])
        wire(draft, "vision", SINK, at="image")
    random_media(draw, draft, {"image": [1, 8, 8]})


def vision_and_audio(draw: st.DrawFn, draft: Draft) -> None:
    """Two encoders of different kinds and depths, each with its projector."""
    siglip(draw, draft, channels=2)
    whisper(draw, draft, "audio")
    mlp(draw, draft, "projector")
    mlp(draw, draft, "audio_projector")
    llm(draw, draft)
    wire(draft, "vision", "projector", SINK, at="image")
    wire(draft, "audio", "audio_projector", SINK, at="sound")
    random_media(draw, draft, {"image": [2, 8, 8], "sound": [3, 6]})


def two_consumers(draw: st.DrawFn, draft: Draft) -> None:
    """One encoder whose rows go through two projectors to two placeholders."""
    siglip(draw, draft)
    draft.tables["modules"]["vision"]["media"] = "image"
    mlp(draw, draft, "projector")
    mlp(draw, draft, "second")
    llm(draw, draft)
    wire(draft, "vision", "projector", SINK, at="image")
    wire(draft, "vision", "second", SINK, at="glance")
    random_media(draw, draft, {"image": [1, 8, 8]}, same={"glance": "image"})


def qwen3_vl(draw: st.DrawFn, draft: Draft) -> None:
    """Qwen3-VL: images of different sizes, positions of three axes, DeepStack features as side outputs."""
    layers = draw(st.integers(2, 4))
    draft.tables["modules"] = {
        "vision": {
            "model": "qwen3_vl_vision",
            "config": {
                "hidden_size": 16,
                "depth": 3,
                "num_heads": 2,
                "intermediate_size": 12,
                "patch_size": 2,
                "temporal_patch_size": draw(st.sampled_from([1, 2])),
                "num_position_embeddings": 9,
                "deepstack_visual_indexes": draw(st.sampled_from([[0, 2], [1], []])),
            },
        },
        SINK: {
            "model": "qwen3_vl_text",
            "config": {
                "hidden_size": 12,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "num_key_value_heads": draw(st.sampled_from([4, 2, 1])),
                "head_dim": 8,
                "intermediate_size": 14,
            },
        },
    }
    draft.heads["vision"] = 4
    draft.shares_tokens = (SINK, "vision")
    _decoder(draft)
    wire(draft, "vision", SINK, at="image")
    random_media(draw, draft, {"image": [1, 4, 4]}, largest={"image": [1, 8, 12]})


def text_alone(draw: st.DrawFn, draft: Draft) -> None:
    """An LLM without any encoder."""
    llm(draw, draft)
    random_media(draw, draft, {})


GRAPHS: Mapping[str, Callable[[st.DrawFn, Draft], None]] = {
    "digits": digits,
    "one encoder": one_encoder,
    "vision and audio": vision_and_audio,
    "two consumers": two_consumers,
    "qwen3_vl": qwen3_vl,
    "text alone": text_alone,
    "own models": user_models,
    "directories": directories,
    "processors": processors,
}
"""To add a graph, write one function and enter it here."""
