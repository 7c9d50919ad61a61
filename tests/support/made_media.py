"""Directories whose tokenizer has further special tokens, and files of what an assistant makes."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from PIL import Image

MADE, SOUND, VECTOR = "<|image_out|>", "<|audio_out|>", "<|action|>"


def add_tokens(folder: Path) -> None:
    """Give the tokenizer of a directory the tokens of what is made."""
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in (MADE, SOUND, VECTOR)])
    tokenizer.save_pretrained(folder)


def write_files(folder: Path) -> None:
    """Images `wide.png` (20 rows of 30) and `square.png` (8 of 8), `sound.wav`, and `vector.npy` `[2, 3]`."""
    draw = np.random.default_rng(0)
    for name, size in (("wide.png", (20, 30, 3)), ("square.png", (8, 8, 3))):
        Image.fromarray(draw.integers(0, 256, size, dtype=np.uint8)).save(folder / name)
    np.save(folder / "vector.npy", draw.normal(size=(2, 3)))
    with wave.open(str(folder / "sound.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(1600)
        file.writeframes(draw.integers(-9999, 9999, 700, dtype=np.int16).tobytes())
