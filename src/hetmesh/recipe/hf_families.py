"""What is peculiar about families of multimodal models in transformers: declared values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

MEDIA: Mapping[str, str] = MappingProxyType({"vision": "image", "audio": "audio"})
"""Modules that a directory expands to, beside `llm`, and the kind of media each reads."""


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        mask: what tokens of the LLM see of each other (`hetmesh.context.masks.MASKS`).
        positions: `"from_0"`, `"from_1"`, or `"rope_index"`: three axes, by the model's own `get_rope_index`; empty:
            that if it has one, else `"from_0"`.
        by_parts: kinds of media for which there is no `get_..._features`, so that hetmesh calls tower and projector.
        around: kind of media -> config keys of the tokens right before and after an item, by which the model's own
            `get_rope_index` finds it; absent: it is given where items are.
        experts: whether its LLM's mixture-of-experts blocks are built as Qwen3-MoE's are (`hetmesh.parallel.experts`),
            so that ranks can share them.
        inside: of a model of which hetmesh trains a part: the config key of the part, and its class.
        refused: why hetmesh does not take the family.
    """

    mask: str = "causal"
    positions: str = ""
    by_parts: tuple[str, ...] = ()
    around: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    experts: bool = False
    inside: tuple[str, str] | None = None
    refused: str = ""


CROSS_ATTENTION = "its LLM reads images through cross-attention, not as rows among its tokens"
DISCRETE_IMAGES = "its images are tokens of its vocabulary, not rows"
OMNI: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("image", "video"), ("vision_start_token_id", "vision_end_token_id")),
        "audio": ("audio_start_token_id", "audio_end_token_id"),
    }
)
NO_TOWER = "it calls no tower by get_image_features, by which hetmesh splits models"

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **dict.fromkeys(("gemma3", "gemma4_unified"), Family(mask="bidirectional_runs")),
        "paligemma": Family(mask="prefix", positions="from_1"),
        **dict.fromkeys(("qwen3_vl_moe", "qwen3_5_moe"), Family(experts=True)),
        "qwen2_5_omni": Family(inside=("thinker_config", "Qwen2_5OmniThinkerForConditionalGeneration")),
        "qwen2_5_omni_thinker": Family(around=OMNI),
        "qwen3_omni_moe": Family(inside=("thinker_config", "Qwen3OmniMoeThinkerForConditionalGeneration")),
        "qwen3_omni_moe_thinker": Family(around=OMNI),
        "qwen2_audio": Family(by_parts=("audio",)),
        "mllama": Family(refused=CROSS_ATTENTION),
        "idefics": Family(refused=CROSS_ATTENTION),
        "chameleon": Family(refused=DISCRETE_IMAGES),
        "emu3": Family(refused=DISCRETE_IMAGES),
        "instructblip": Family(refused="its tower reads the question, too (qformer_input_ids)"),
        "florence2": Family(refused="its LLM is an encoder and a decoder, not a causal LLM"),
        **dict.fromkeys(("instructblipvideo", "kosmos-2", "kosmos-2.5", "pix2struct"), Family(refused=NO_TOWER)),
        "nemo_speechlm": Family(refused="what its tower hears at an end depends on the other recordings of a batch"),
        "ovis2": Family(refused="it also embeds indicator tokens beside its rows, which hetmesh does not place"),
    }
)


def part_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the part that hetmesh trains: of all of it, mostly."""
    inside = family_of(str(config.get("model_type"))).inside
    part = config.get(inside[0]) if inside else None
    return part if isinstance(part, Mapping) else config


def class_of(config: Mapping[str, Any]) -> str:
    """The class of the model, or of the part of it, that a config.json names; empty without one."""
    inside = family_of(str(config.get("model_type"))).inside
    given = config.get("architectures")
    return inside[1] if inside else str(given[0]) if isinstance(given, list) and given else ""


def family_of(model_type: str) -> Family:
    """The row of a `model_type`, or the defaults."""
    return FAMILIES.get(model_type, Family())
