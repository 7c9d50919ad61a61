"""What is peculiar about families of multimodal models in transformers, and about their processors: declared values."""

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
        calls: kind of media -> how its items are handed over (`hetmesh.models.split.item_calls.CALLS`); absent: by the
            signature.
        around: kind of media -> config keys of the tokens right before and after an item, by which the model's own
            `get_rope_index` finds it; absent: it is given where items are.
        experts: whether its LLM's mixture-of-experts blocks are built as Qwen3-MoE's are (`hetmesh.parallel.experts`),
            so that ranks can share them.
        inside: of a model of which hetmesh trains a part: the config key of the part, and its class.
        refused: why hetmesh does not take the family.
    """

    mask: str = "causal"
    positions: str = ""
    calls: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    around: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    experts: bool = False
    inside: tuple[str, str] | None = None
    refused: str = ""


CROSS_ATTENTION = "its LLM reads images through cross-attention, not as rows among its tokens"
DISCRETE_IMAGES = "its images are tokens of its vocabulary, not rows"
NO_TOWER = "it calls no tower by get_image_features, by which hetmesh splits models"
WHOLE_SOUNDS = "its get_audio_features takes recordings in a form that hetmesh does not make"

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma3": Family(mask="bidirectional_runs"),
        "paligemma": Family(mask="prefix", positions="from_1"),
        "llava_onevision": Family(calls={"image": "any_resolution"}),
        "qwen3_vl_moe": Family(experts=True),
        "glm_ocr": Family(calls={"image": "patches"}),  # transformers knows no image processor by its name
        "qwen2_5_omni": Family(inside=("thinker_config", "Qwen2_5OmniThinkerForConditionalGeneration")),
        "qwen2_5_omni_thinker": Family(
            calls={"image": "patches"},
            around={
                "image": ("vision_start_token_id", "vision_end_token_id"),
                "audio": ("audio_start_token_id", "audio_end_token_id"),
            },
        ),
        "qwen2_audio": Family(calls={"audio": "padded_frames"}),
        "mllama": Family(refused=CROSS_ATTENTION),
        "idefics": Family(refused=CROSS_ATTENTION),
        "chameleon": Family(refused=DISCRETE_IMAGES),
        "emu3": Family(refused=DISCRETE_IMAGES),
        "instructblip": Family(refused="its tower reads the question, too (qformer_input_ids)"),
        "florence2": Family(refused="its LLM is an encoder and a decoder, not a causal LLM"),
        **dict.fromkeys(("instructblipvideo", "kosmos-2", "kosmos-2.5", "pix2struct"), Family(refused=NO_TOWER)),
        **dict.fromkeys(("voxtral", "qwen3_asr", "glmasr"), Family(refused=WHOLE_SOUNDS)),
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


@dataclass(frozen=True)
class Prompt:
    """What one processor writes. In `written` and `image`, `{image}` is the token of an image's rows; other
    names in braces are those of `tokens`.

    Attributes:
        written: the token that chat templates write for an image.
        image: what the processor puts in its place; the rows come as one `{image}`.
        tokens: names under which tokenizer_config.json has tokens -> the token if it has none.
        template: the form in which the processor takes a turn of each side, where there are no chat templates.
        default: the chat template of a processor that takes its own where none is beside it, whatever the tokenizer's.
        special_tokens: whether the tokenizer adds its own (a BOS) to a text that does not begin with one.
        refused: why its prompts cannot be followed.
        tiles: `"always"` if it has images cut into tiles, whatever its image processor says by itself, or `"asked"` if
            that is what it says, by default too; empty where images are one tile each.
    """

    written: str = "{image}"
    image: str = "{image}"
    tokens: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    template: str = ""
    default: str = ""
    special_tokens: bool = True
    refused: str = ""
    tiles: str = ""

    def replacements(self, image: str, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
        """What a template writes -> what is put in its place; empty where that is the same."""
        named = {name: _token(tokenizer_config, name) or default for name, default in self.tokens.items()}
        written, text = (template.format(image=image, **named) for template in (self.written, self.image))
        return {} if written == text else {written: text}


def _token(tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    for table in (tokenizer_config, *(tokenizer_config.get(key) for key in _TOKEN_TABLES)):
        value = table.get(name) if isinstance(table, Mapping) else None
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            return value
    return None


_TOKEN_TABLES = ("extra_special_tokens", "model_specific_special_tokens")

_PALIGEMMA = (  # images, BOS, prompt, line feed; then the answer
    "{% for m in messages %}"
    "{% if m.role == 'user' and loop.first %}{% set last = namespace(image=-1) %}"
    "{% for p in m.content %}{% if p.type == 'image' %}{% set last.image = loop.index0 %}{% endif %}{% endfor %}"
    "{% if last.image < 0 %}{{ bos_token }}{% endif %}"
    "{% for p in m.content %}{% if p.type == 'image' %}{{ '<image>' }}{% else %}{{ p.text }}{% endif %}"
    "{% if loop.index0 == last.image %}{{ bos_token }}{% endif %}{% endfor %}{{ '\\n' }}"
    "{% elif m.role == 'assistant' and loop.index0 == 1 %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ raise_exception('PaliGemma takes one turn of the user and one of the assistant') }}{% endif %}"
    "{% endfor %}"
)

_QWEN2_AUDIO = (
    "{% set heard = namespace(count=0) %}{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'audio' %}{% set heard.count = heard.count + 1 %}"
    "Audio {{ heard.count }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)

_PLAIN = Prompt()

PROMPTS: Mapping[str, Prompt] = MappingProxyType(
    {
        **dict.fromkeys(("LlavaProcessor", "LlavaNextProcessor"), _PLAIN),
        "LlavaOnevisionProcessor": Prompt(tiles="always"),
        **dict.fromkeys(("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"), _PLAIN),
        **dict.fromkeys(("Glm4vProcessor", "Glm46VProcessor", "Qwen2_5OmniProcessor"), _PLAIN),
        "Qwen2AudioProcessor": Prompt(default=_QWEN2_AUDIO),
        "InternVLProcessor": Prompt(
            image="{start_image_token}{image}{end_image_token}",
            tokens={"start_image_token": "<img>", "end_image_token": "</img>"},
            tiles="always",
        ),
        "Gemma3Processor": Prompt(
            written="{boi_token}",
            image="\n\n{boi_token}{image}{eoi_token}\n\n",
            tokens={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
            tiles="asked",
        ),
        "Idefics3Processor": Prompt(
            image="<fake_token_around_image><global-img>{image}<fake_token_around_image>", tiles="asked"
        ),
        "SmolVLMProcessor": Prompt(
            image="{fake_image_token}{global_image_token}{image}{fake_image_token}",
            tokens={"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
            tiles="asked",
        ),
        "PaliGemmaProcessor": Prompt(template=_PALIGEMMA, special_tokens=False),
        "PixtralProcessor": Prompt(
            refused="it writes [IMG_BREAK] after every line of an image's patches, and hetmesh places the rows of an "
            "image side by side"
        ),
    }
)

PROCESSORS: Mapping[str, str] = MappingProxyType(
    {
        "llava": "LlavaProcessor",
        "vipllava": "LlavaProcessor",
        "llava_next": "LlavaNextProcessor",
        "llava_onevision": "LlavaOnevisionProcessor",
        "qwen2_vl": "Qwen2VLProcessor",
        "qwen2_5_vl": "Qwen2_5_VLProcessor",
        "qwen3_vl": "Qwen3VLProcessor",
        "qwen3_vl_moe": "Qwen3VLProcessor",
        "glm4v": "Glm4vProcessor",
        "qwen2_audio": "Qwen2AudioProcessor",
        "qwen2_5_omni": "Qwen2_5OmniProcessor",
        "internvl": "InternVLProcessor",
        "gemma3": "Gemma3Processor",
        "idefics3": "Idefics3Processor",
        "smolvlm": "SmolVLMProcessor",
        "paligemma": "PaliGemmaProcessor",
        "mistral3": "PixtralProcessor",
    }
)
"""Processor class by `model_type`, where no file of a directory names one."""
