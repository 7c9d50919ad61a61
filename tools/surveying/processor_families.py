"""What tells families' processors apart, where the rules of `tiny_processor.py` do not find it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surveying.tower_sizes import tower

Options = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
"""Arguments of a class, or what makes them from a config."""


@dataclass(frozen=True)
class Family:
    """A family's processor, where it is not as most are.

    Attributes:
        like: The model type under which transformers lists its classes, those that it does not list under its own.
        audio_like: The same of its feature extractor.
        names: Token by attribute of the tokenizer.
        ids: Token by key of the config without its `_id` or `_index`.
        further: Special tokens that no source text has.
        parts: Model type by key of the config, for towers that the default config has not.
        config: Value by dotted key of the tiny config, set before the model is made.
        image, video, audio, processor: Arguments of these classes.
        call: Arguments of a call of the processor, without which the model cannot use what it gives.
        said: Token of a prompt by kind, where it is not the processor's `image_token` and so on.
        around: Prompt by kind, with `{}` where that token is.
        rows_by_forward: Kinds whose rows are not all that a method such as `get_image_features` gives: the forward
            takes some of them.
        template: Whether it gets a chat template.
        reason: Why it cannot be made.
    """

    like: str = ""
    audio_like: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    further: Sequence[str] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    config: Options = field(default_factory=dict)
    image: Options = field(default_factory=dict)
    video: Options = field(default_factory=dict)
    audio: Options = field(default_factory=dict)
    processor: Options = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)
    around: Mapping[str, str] = field(default_factory=dict)
    rows_by_forward: Sequence[str] = ()
    template: bool = True
    reason: str = ""


def valued(options: Options, config: Any) -> dict[str, Any]:
    """The arguments, made from the config where they depend on it."""
    return dict(options(config) if callable(options) else options)


def _only(reason: str) -> Family:
    return Family(reason=reason)


def _around(kinds: str, start: str, end: str) -> dict[str, str]:
    return dict.fromkeys(kinds.split(), f"{start}{{}}{end}")


QWEN = Family(around=_around("image video", "<|vision_start|>", "<|vision_end|>"))
GLM = Family(
    ids={
        "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>",
        "video_start_token": "<|begin_of_video|>",
        "video_end_token": "<|end_of_video|>",
    },
    around=_around("image", "<|begin_of_image|>", "<|end_of_image|>")
    | _around("video", "<|begin_of_video|>", "<|end_of_video|>"),
)
OMNI = Family(
    ids={
        "audio_start_token": "<|audio_bos|>",
        "audio_end_token": "<|audio_eos|>",
        "vision_start_token": "<|vision_bos|>",
        "vision_end_token": "<|vision_eos|>",
    },
    audio={"chunk_length": 2},
    around=_around("image video", "<|vision_bos|>", "<|vision_eos|>")
    | _around("audio", "<|audio_bos|>", "<|audio_eos|>"),
)
VISION_IDS = {"vision_start_token_id": 500, "vision_end_token_id": 501}
"""Their published configs have them, the class's defaults have not."""


def qwen3_omni(thinker: Any) -> dict[str, int]:
    return {**VISION_IDS, "audio_end_token_id": 502, "audio_config.output_dim": thinker.text_config.hidden_size}


INTERNVL = Family(ids={"image_token": "<|context_image|>"})
ROWS_AND_COLUMNS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
GOT_OCR = Family(
    config={
        "vision_config.image_size": 1024,  # its processor makes 256 tokens of an image, whatever the config says
        "vision_config.num_hidden_layers": 2,
        "vision_config.num_attention_heads": 1,
        "vision_config.global_attn_indexes": [1],
    },
)
MUSE = Family(
    config=lambda config: {
        "out_hidden_size": config.vision_config.hidden_size * config.vision_config.merge_size**2,
        "projector_hidden_size": 256,
        **({"audio_config.hidden_sizes": [32, 64, 64, 128]} if hasattr(config, "audio_config") else {}),
    },
    call={"return_metadata": True},
)
MINICPM = Family(
    config={
        "image_token_id": 1,
        "video_token_id": 3,
        **dict.fromkeys(("insert_layer_id", "vision_config.insert_layer_id"), 2),  # a layer that there is
    },
    image={"scale_resolution": 128},
    video={"scale_resolution": 128},
)
GEMMA4 = Family(
    names={"audio_token": "<|audio|>", "boa_token": "<|boa|>", "eoa_token": "<|eoa|>"},
    parts={"vision_config": "gemma4_vision", "audio_config": "gemma4_audio"},
    config={
        "text_config.vocab_size_per_layer_input": 512,
        "text_config.head_dim": 32,  # attention is not scaled by it: steps with larger heads amplify rounding
        "text_config.per_layer_config": {3: {"head_dim": 64}},  # the layer of full attention
    },
    image={"max_soft_tokens": 70},
    video={"num_frames": 4},
    rows_by_forward=("audio",),  # it drops those of padding
)
RECORDINGS = _around("audio", "<|audio_bos|>", "<|audio_eos|>")

FAMILIES: Mapping[str, Family] = {
    "blip-2": Family(config={"image_token_index": 1}, said={"image": ""}, template=False),
    "aya_vision": Family(ids={"image_token": "<|IMG_PATCH|>"}),
    "cohere2_vision": Family(
        image=lambda config: {"patch_size": tower(config).side // tower(config).patch // config.downsample_factor}
    ),
    "deepseek_vl_hybrid": Family(
        image=lambda config: {
            "high_res_size": dict.fromkeys(("height", "width"), config.high_res_vision_config.image_size)
        }
    ),
    "ernie4_5_vl_moe": Family(
        config={"text_config.moe_intermediate_size": [64, 32]},
        video={"draw_on_frames": False},  # else it wants a font from the Hub
        around=_around("image", "<|image_start|>", "<|image_end|>")
        | _around("video", "<|video_start|>", "<|video_end|>"),
    ),
    "fast_vlm": Family(
        like="llava",
        image={"size": {"shortest_edge": 256}, "crop_size": {"height": 256, "width": 256}},
        processor={"patch_size": 64},
    ),
    "gemma4": GEMMA4,
    "gemma4_unified": replace(
        GEMMA4, parts={"vision_config": "gemma4_unified_vision", "audio_config": "gemma4_unified_audio"}
    ),
    "glm46v": GLM,
    "glm4v": GLM,
    "glm4v_moe": replace(GLM, like="glm4v"),
    "glm5_next": replace(
        GLM,
        image={"min_image_tokens": 4, "max_image_tokens": 16},
        video={"min_image_tokens": 4, "max_image_tokens": 64},
    ),
    "glm_ocr": replace(GLM, like="glm46v"),
    "glmga": replace(GLM, like="glm46v"),
    "hunyuan_vl": Family(
        names={f"image{part}_token": f"<|image{part}|>" for part in ("", "_start", "_end")},
        ids={"im_start_id": "<|image_start|>", "im_end_id": "<|image_end|>"},
        config={
            "text_config.head_dim": 128,
            "text_config.rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "mrope_section": [16, 16, 16, 16],
            },
            "im_start_id": 501,
            "im_end_id": 502,
            "im_newline_id": 503,
        },
        around=_around("image", "<|image_start|>", "<|image_end|>"),
    ),
    "hy_v4_vl": Family(
        further=("<|image_start|>", "<|image_end|>"), around=_around("image video", "<|image_start|>", "<|image_end|>")
    ),
    "idefics2": Family(
        further=("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
        processor=lambda config: {"image_seq_len": config.perceiver_config.resampler_n_latents},
    ),
    "idefics3": Family(further=ROWS_AND_COLUMNS),
    "inkling2": Family(config={"text_config.unpadded_vocab_size": 512}),
    "inkling2_loop": Family(config={"text_config.unpadded_vocab_size": 512}),
    "internvl": INTERNVL,
    "kimi_k25": Family(image={"max_patches": 64}, video={"max_patches": 64}),
    "llama4": _only(
        "transformers' Llama4ForConditionalGeneration.forward fails: its LLM's output has no image_outputs"
    ),
    "minicpm_ocr": MINICPM,
    "minicpmv4_6": MINICPM,
    "minicpmv4_7": MINICPM,
    "molmo2": Family(
        ids={
            "image_patch_id": "<im_patch>",
            "image_col_id": "<im_col>",
            "image_start_token": "<im_start>",
            "image_end_token": "<im_end>",
            "low_res_image_start_token": "<low_res_im_start>",
            "frame_start_token": "<frame_start>",
            "frame_end_token": "<frame_end>",
        },
        config={"vision_config.num_position_embeddings": 16},
        image={"overlap_margins": [1, 1]},
    ),
    "ovis2": Family(
        config=lambda config: {"hidden_size": config.text_config.hidden_size},
        ids={
            "image_token": "<IMG_ATOM>",
            "visual_indicator_0": "<IMG_START>",
            "visual_indicator_1": "<IMG_GRID>",
            "visual_indicator_2": "<IMG_COL>",
            "visual_indicator_3": "<IMG_ROW>",
            "visual_indicator_4": "<IMG_END>",
        },
    ),
    "muse_glimmer": MUSE,
    "muse_spark": MUSE,
    "nemotron_h_omni": Family(
        audio_like="parakeet_encoder",
        config={"image_token_id": 1, "video_token_id": 3, "audio_token_id": 2},
        image={"min_num_patches": 16, "max_num_patches": 64},
        video={"video_target_num_patches": 64, "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3},
    ),
    "paddleocr_vl": QWEN,
    "paligemma": Family(further=("<image>",), config={"text_config.vocab_size": 2048}, template=False),
    "qianfan_ocr": replace(INTERNVL, said={"image": "<image>"}),
    "qwen2_5_omni": replace(OMNI, config={f"thinker_config.{key}": number for key, number in VISION_IDS.items()}),
    "qwen2_5_omni_thinker": replace(OMNI, like="qwen2_5_omni", config=VISION_IDS),
    "qwen2_5_vl": QWEN,
    "qwen2_audio": Family(config={"audio_config.max_source_positions": 100}, around=RECORDINGS),
    "qwen2_vl": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_asr": Family(
        config=lambda config: {"audio_config.output_dim": config.text_config.hidden_size}, around=RECORDINGS
    ),
    "qwen3_omni_moe": replace(
        OMNI,
        config=lambda config: (
            {f"thinker_config.{key}": n for key, n in qwen3_omni(config.thinker_config).items()}
            | {"talker_config.text_config.shared_expert_intermediate_size": 64, "talker_config.spatial_merge_size": 2}
        ),
    ),
    "qwen3_omni_moe_thinker": replace(OMNI, like="qwen3_omni_moe", config=qwen3_omni),
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": replace(QWEN, like="qwen3_vl"),
    "qwen4_exp": replace(
        QWEN,
        config={
            "text_config.indexer_n_heads": 4,
            "text_config.indexer_kv_heads": 1,
            "text_config.indexer_head_dim": 256,
            "text_config.indexer_budget": 64,
            "text_config.indexer_compress_ratio": 4,
        },
    ),
    "cosmos3_edge": replace(QWEN, call={"return_mm_token_type_ids": True, "return_metadata": True}),
    "cosmos3_omni": replace(QWEN, like="qwen3_vl"),
    "exaone4_5": QWEN,
    "lfm3_vl": QWEN,
    "step3p7": Family(
        config=lambda config: {
            "text_config.sliding_window": 64,
            "vision_config.image_size": 112,
            "vision_config.intermediate_size": int(config.vision_config.hidden_size * config.vision_config.mlp_ratio),
        },
        image=lambda config: {
            "patch_size": tower(config).side // 2,
            "size": {"height": tower(config).side, "width": tower(config).side},
            "vision_patch_size": tower(config).patch,
        },
    ),
    "smolvlm": Family(further=ROWS_AND_COLUMNS),
    "video_llava": Family(
        image=lambda config: {
            "size": {"shortest_edge": tower(config).side},
            "crop_size": dict.fromkeys(("height", "width"), tower(config).side),
        }
    ),
    "vipllava": Family(processor={"vision_feature_select_strategy": "default"}),
    "cohere_compass": replace(
        QWEN,
        around=_around("image video", "<|VISION_START|>", "<|VISION_END|>"),
        config={"text_config.rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "deepseek_ocr2": Family(
        config={
            "text_config.num_experts_per_tok": 2,
            "text_config.mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "vision_config.sam_config.downsample_channels": [512, 512],
            "vision_config.sam_config.num_hidden_layers": 2,
            "vision_config.sam_config.num_attention_heads": 1,
            "vision_config.sam_config.global_attn_indexes": [1],
        }
    ),
    "dots3_note": Family(
        config={
            "audio_config.conv_output_size": 7680,
            "vision_config.per_layer_config": {3: {"num_local_experts": 4}},
            "text_config.per_layer_config": {i: {"qk_nope_head_dim": 192, "kv_lora_rank": 256} for i in (2, 3)},
        },
        image={"temporal_patch_size": 1},
        video={"temporal_patch_size": 1},
    ),
    "granite4_vision": Family(
        config={"downsample_rate": "2/4", "deepstack_layer_map": [[-2, 0], [-1, 1]]}, rows_by_forward=("image",)
    ),
    "perception_lm": Family(
        config=lambda config: {
            "vision_config.architecture": "vit_pe_core_tiny_patch16_384",
            "vision_config.model_args": {
                "depth": 2,
                "embed_dim": 192,
                "img_size": [64, 64],
                "global_pool": "",
                "use_post_transformer_norm": False,
            },
        },
        image={"tile_size": 64, "size": {"height": 64, "width": 64}, "vision_input_type": "vanilla"},
        video={"size": {"height": 64, "width": 64}},
        processor=lambda config: {"patch_size": 16, "pooling_ratio": config.projector_pooling_ratio},
    ),
    "unlimited_ocr": Family(
        config=lambda config: {
            "vision_config.sam_config.downsample_channels": [512, config.vision_config.encoder_config.hidden_size]
        },
        image={"size": {"height": 256, "width": 256}, "tile_size": 128, "maximum_pad_value": 128, "max_patches": 4},
    ),
    "got_ocr2": GOT_OCR,
    "pp_chart2table": replace(
        GOT_OCR,
        said={"image": 256 * "<imgpad>"},  # its processor leaves them to the text
        ids={"image_token": "<imgpad>"},
        further=("<imgpad>",),
    ),
    "aria": Family(
        config={"vision_config.patch_size": 14, "vision_config.image_size": 980, "vision_config.num_hidden_layers": 2},
        image={"max_image_size": 490},
    ),
    "phi4_multimodal": Family(
        config={
            "vision_config.image_size": 448,
            "audio_config.ext_pw_out_channel": 256,
            "audio_config.depthwise_separable_out_channel": 256,
        },
        image={"dynamic_hd": 4},
    ),
    "gemma3n": _only("its vision tower is timm's mobilenetv5_300m_enc, of 300 million parameters"),
    "granite_speech": _only("its feature extractor needs torchaudio"),
    "granite_speech_plus": _only("its feature extractor needs torchaudio"),
    "fun_asr_nano": _only("its feature extractor needs torchaudio"),
    "voxtral": _only("its tokenizer is mistral-common's, which has no tiny form"),
    "voxtral_realtime": _only("its tokenizer is mistral-common's, which has no tiny form"),
    "omniasr": Family(config={"audio_config.num_hidden_layers": 8}),  # more than it has convolutions before them
    "nemo_speechlm": Family(
        config={"text_config.layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
        audio={"feature_size": 128},
    ),
    "vibevoice_asr": Family(
        config={
            f"{kind}_tokenizer_encoder_config.{key}": value
            for kind in ("acoustic", "semantic")
            for key, value in {"num_filters": 4, "depths": [1, 1, 1, 1, 1, 1, 1]}.items()
        },
        around=_around("audio", "<|object_ref_start|>", "<|object_ref_end|>"),
    ),
}
