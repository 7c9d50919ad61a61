"""A tokenizer of a few words, for tools that make data of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def save_word_tokenizer(folder: Path, words: Sequence[str], placeholders: Sequence[str]) -> None:
    """Write a directory that transformers loads: words between spaces, `<unk>`, `<s>` and `</s>` among them.

    Args:
        placeholders: those of the words that stand for media.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(placeholders),
    ).save_pretrained(folder)
