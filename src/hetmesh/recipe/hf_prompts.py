"""What processors of transformers make of the text that a chat template writes: declared values, by processor class.

A processor puts a text of its own in place of the token that the template writes for an image, and lets the tokenizer
add its special tokens. The values are those of `__init__`, `replace_image_token` and `prepare_inputs_layout` of each
class in transformers 5.23, whose own results the tests compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


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
        written, text = (each.format(image=image, **named) for each in (self.written, self.image))
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
            refused="it writes [IMG_BREAK] behind every line of an image's patches, and hetmesh places the rows of an "
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
