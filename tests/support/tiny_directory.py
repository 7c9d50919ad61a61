"""A tiny model as the directory that users have: weights, tokenizer, chat template and image processor."""

from __future__ import annotations

from pathlib import Path

from support import tiny_vlms

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %} <|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %} <|im_end|> {% endfor %}"
)
WORDS = ["<pad>", "<|image_pad|>", "<unk>", "<|im_end|>", "user", "assistant", "what", "is", "this", "a", "cat", "dog"]
WORDS += [f"w{i}" for i in range(len(WORDS), 43)] + ["<|vision_start|>", "<|vision_end|>"]
WORDS[tiny_vlms.VIDEO] = "<|video_pad|>"


def save_directory(name: str, folder: Path) -> Path:
    """The directory `folder/name`, of a model in the way of Qwen-VL."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    path = folder / name
    tiny_vlms.build(name).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<|image_pad|>", "<|video_pad|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=special
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    Qwen2VLImageProcessorPil(
        patch_size=2, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 32, "longest_edge": 200}
    ).save_pretrained(path)
    return path
