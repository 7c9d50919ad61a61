"""Tiny random multimodal models of transformers, saved as the directories that users have.

Every parameter is random, biases and norms too, or a wrong one would not be seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

TEMPORARY = tempfile.gettempdir()  # looked for now: it draws random numbers, which strategies may not
VOCAB = 512
IMAGE, VIDEO, AUDIO = 1, 40, 1
"""Token ids of the placeholders; the first one of `RandomMedia` is 1."""

SIZES: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
TEXT: Mapping[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 41,
    "eos_token_id": 42,
    "max_position_embeddings": 512,
}
TOWER: Mapping[str, Any] = {**SIZES, "hidden_size": 16, "image_size": 8, "patch_size": 2}
QWEN_TOWER: Mapping[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 24,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
MROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}

EXPERTS: Mapping[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def _text(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    own = {"head_dim": 6} if kind in ("qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "llama") else {}
    return {"model_type": kind, **TEXT, **own, **changes}


def _llava(tower: str = "clip_vision_model", text: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    import transformers as t

    vision = {"model_type": tower, **TOWER}
    given = {"vision_config": vision, "text_config": dict(text or _text()), "image_token_index": IMAGE}
    return t.LlavaForConditionalGeneration(t.LlavaConfig(**given, vision_feature_layer=-2, **changes))


def _llava_siglip() -> Any:
    return _llava("siglip_vision_model", vision_feature_select_strategy="full", projector_hidden_act="gelu")


def _onevision() -> Any:
    import transformers as t

    vision = {"model_type": "siglip_vision_model", **TOWER}
    config = t.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=_text("qwen2"),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]],
        vision_feature_layer=-1,
    )
    return t.LlavaOnevisionForConditionalGeneration(config)


def _internvl(text: str = "qwen2") -> Any:
    import transformers as t

    vision = {**TOWER, "image_size": [8, 8], "patch_size": [2, 2]}
    config = t.InternVLConfig(
        vision_config=vision, text_config=_text(text), image_token_id=IMAGE, vision_feature_layer=-1
    )
    return t.InternVLForConditionalGeneration(config)


def _gemma3(**changes: Any) -> Any:
    import transformers as t

    vision = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False}
    text = _text("gemma3_text", sliding_window=12, query_pre_attn_scalar=6, num_hidden_layers=4)
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, **changes}
    ids = {"image_token_index": IMAGE, "boi_token_index": 43, "eoi_token_index": 44}
    return t.Gemma3ForConditionalGeneration(
        t.Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=4, **ids)
    )


def _paligemma(text: str = "gemma") -> Any:
    import transformers as t

    vision = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False, "projection_dim": 24}
    given = _text(text, num_key_value_heads=2)
    if text == "gemma2":
        given |= {"query_pre_attn_scalar": 6, "sliding_window": 12}
    config = t.PaliGemmaConfig(
        vision_config=vision,
        text_config=given,
        image_token_index=IMAGE,
        projection_dim=24,
        hidden_size=24,
    )
    return t.PaliGemmaForConditionalGeneration(config)


def _idefics3(name: str = "Idefics3") -> Any:
    import transformers as t

    config = getattr(t, f"{name}Config")(
        vision_config=dict(TOWER), text_config=_text("llama"), scale_factor=2, image_token_id=IMAGE, pad_token_id=0
    )
    return getattr(t, f"{name}ForConditionalGeneration")(config)


def _mistral3() -> Any:
    import transformers as t

    vision = {"model_type": "pixtral", **TOWER, "head_dim": 4, "image_size": 16}
    config = t.Mistral3Config(
        vision_config=vision,
        text_config=_text("mistral", sliding_window=None),
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    return t.Mistral3ForConditionalGeneration(config)


def _qwen2_5_vl() -> Any:
    import transformers as t

    vision = {**QWEN_TOWER, "window_size": 8, "fullatt_block_indexes": [1]}
    text = {**TEXT, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": dict(MROPE)}
    config = t.Qwen2_5_VLConfig(vision_config=vision, text_config=text, **_vision_ids())
    return t.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl() -> Any:
    import transformers as t

    vision = {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = {**TEXT, "head_dim": 12, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    config = t.Qwen3VLConfig(vision_config=vision, text_config=text, **_vision_ids())
    return t.Qwen3VLForConditionalGeneration(config)


def _qwen3_vl_moe() -> Any:
    import transformers as t

    vision = {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = {**TEXT, **EXPERTS, "head_dim": 12, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    config = t.Qwen3VLMoeConfig(vision_config=vision, text_config=text, **_vision_ids())
    return t.Qwen3VLMoeForConditionalGeneration(config)


DELTA_NET: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 6,
}


def _qwen3_5(kind: str = "Qwen3_5", **changes: Any) -> Any:
    import transformers as t

    vision = {**QWEN_TOWER, "num_position_embeddings": 16}
    text = {**TEXT, **DELTA_NET, "head_dim": 12, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}, **changes}
    config = getattr(t, f"{kind}Config")(vision_config=vision, text_config=text, **_vision_ids())
    return getattr(t, f"{kind}ForConditionalGeneration")(config)


def _qwen3_5_moe() -> Any:
    return _qwen3_5("Qwen3_5Moe", **EXPERTS, shared_expert_intermediate_size=8)


def mamba() -> Any:
    """A LLaVA whose LLM has layers of Mamba-2 around one of attention."""
    text = {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8}
    text |= {"mamba_n_groups": 2, "mamba_chunk_size": 16, "num_local_experts": 0, "shared_intermediate_size": 32}
    return _llava(text={"model_type": "granitemoehybrid", **TEXT, **text})


def _glm4v() -> Any:
    import transformers as t

    vision: dict[str, Any] = {"depth": 3, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    vision["out_hidden_size"] = 24
    vision |= {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "image_size": 8}
    text = {**TEXT, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}
    ids = {**_vision_ids(), "image_start_token_id": 43, "image_end_token_id": 44}
    ids |= {"video_start_token_id": 45, "video_end_token_id": 46}
    return t.Glm4vForConditionalGeneration(t.Glm4vConfig(vision_config=vision, text_config=text, **ids))


def _vision_ids() -> dict[str, int]:
    return {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 43, "vision_end_token_id": 44}


def _qwen2_audio() -> Any:
    import transformers as t

    audio = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32}
    audio |= {"num_mel_bins": 6, "max_source_positions": 50}
    config = t.Qwen2AudioConfig(audio_config=audio, text_config=_text("qwen2"), audio_token_index=AUDIO)
    return t.Qwen2AudioForConditionalGeneration(config)


def _qwen2_5_omni() -> Any:
    import transformers as t

    vision: dict[str, Any] = {"depth": 3, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 24, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"window_size": 8, "fullatt_block_indexes": [1]}
    audio = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "output_dim": 24}
    audio |= {"num_mel_bins": 6, "max_source_positions": 8, "n_window": 4}
    text = {**TEXT, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": dict(MROPE)}
    ids = {"image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": 2}
    ids |= {
        "vision_start_token_id": 43,
        "vision_end_token_id": 44,
        "audio_start_token_id": 45,
        "audio_end_token_id": 46,
        "user_token_id": 47,
    }
    config = t.Qwen2_5OmniThinkerConfig(vision_config=vision, audio_config=audio, text_config=text, **ids)
    return t.Qwen2_5OmniThinkerForConditionalGeneration(config)


MODELS: Mapping[str, Callable[[], Any]] = {
    "llava": _llava,
    "llava_relu": lambda: _llava(projector_hidden_act="relu"),
    "llava_siglip": _llava_siglip,
    "llava_full": lambda: _llava(vision_feature_select_strategy="full"),
    "llava_granite": lambda: _llava(
        text=_text("granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5)
    ),
    "llava_cohere2": lambda: _llava(text=_text("cohere2", logit_scale=0.5, sliding_window=64)),
    "llava_onevision": _onevision,
    "internvl": _internvl,
    "internvl_llama": lambda: _internvl("llama"),
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "paligemma2": lambda: _paligemma("gemma2"),
    "idefics3": _idefics3,
    "smolvlm": lambda: _idefics3("SmolVLM"),
    "mistral3": _mistral3,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "glm4v": _glm4v,
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni": _qwen2_5_omni,
}
"""Builders by name; where several have one `model_type`, they differ in what was once wrong for one of them."""


def save_inside(name: str, key: str, folder: Path) -> Path:
    """The directory of a larger model that has the model `name` as the part that its config calls `key`, beside a part
    that nobody knows."""
    from safetensors.torch import load_file, save_file

    path = save(name, folder)
    part = json.loads((path / "config.json").read_text())
    whole = part["model_type"].removesuffix("_" + key.removesuffix("_config"))
    (path / "config.json").write_text(json.dumps({"model_type": whole, key: part, "other_config": {}}))
    prefix = key.removesuffix("_config")
    tensors = {f"{prefix}.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file({**tensors, "other.weight": torch.zeros(2)}, path / "model.safetensors", {"format": "pt"})
    return path


def kept(name: str) -> Path:
    """The directory of the model `name` in this machine's folder of temporary files, made where it is missing."""
    from surveying import tiny_processor

    version = zlib.crc32(Path(__file__).read_bytes() + Path(tiny_processor.__file__).read_bytes())
    folder = Path(TEMPORARY, f"hetmesh-tiny-vlms-{os.getuid()}-{version:08x}")
    if not (path := folder / name).exists():
        made = save(name, folder / str(os.getpid()))
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(path)
    return path


IMAGES = "kinds = { image = [3, 8, 8] }"
"""Options of `RandomMedia` whose items a model takes that reads plain images."""

PREPARED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("internvl", "idefics3", "smolvlm", "llava_onevision", "mistral3"), ("image",)),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"), ("image",)),
    "qwen2_audio": ("audio",),
    "qwen2_5_omni": ("image", "audio"),
}
"""Models whose directories have a processor, and the kinds of media that it prepares in tests."""

TOWERS: Mapping[str, tuple[str, ...]] = {"qwen2_audio": ("audio",), "qwen2_5_omni": ("vision", "audio")}
"""Modules beside the LLM, of models that have others than one for images."""


def build(name: str, scale: float = 0.2) -> Any:
    """The model `name` with random weights, the same ones every time."""
    torch.manual_seed(7)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=scale)
    return model


def save(name: str, folder: Path) -> Path:
    """The directory `folder/name` with the model `name` in it."""
    model = build(name)
    model.save_pretrained(folder / name)
    save_processor(name, model.config, folder / name)
    return folder / name


def save_processor(name: str, config: Any, path: Path) -> None:
    """Its processor beside a model that has one."""
    from surveying import tiny_processor

    if name in PREPARED:  # SmolVLM's own needs a package for the names of numbers
        tiny_processor.save_processor("idefics3" if name == "smolvlm" else config.model_type, config, path)


def source_of(path: Path) -> tuple[str, str]:
    """The data source that suits the directory `path`, and its options in TOML."""
    if path.name not in PREPARED:
        return "hetmesh.testing.sources:RandomMedia", IMAGES
    return "support.prepared_media:PreparedMedia", f"directory = '{path}', kinds = {list(PREPARED[path.name])}"


def recipe_text(path: Path, more: str = "", items: str = "", **data: Any) -> str:
    """A recipe of the directory `path` with random samples that suit the tiny models.

    Args:
        more: further tables.
        items: options of `RandomMedia`, in TOML; by default those that suit the directory's name.
    """
    source, given = source_of(path), "".join(f", {key} = {value}" for key, value in data.items())
    return f"""
[model]
hf_path = '{path}'
[data]
source = "{source[0]}"
options = {{ {items or source[1]}, apart = true, max_text = 12{given} }}
[training]
local_batch_size = 2
global_batch_size = 8
dtype = "float64"
{more}
"""
