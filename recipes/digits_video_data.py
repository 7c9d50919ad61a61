"""The demo with clips: handwritten digits that appear one after another, some frames each."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from hetmesh.data.digits import NOISE, DigitsSource, Question, data_set, images_of, text_art
from hetmesh.data.source import Sample, wants
from hetmesh.errors import RecipeError
from hetmesh.graph.sample import MediaItem, SampleMeta

KINDS = ("count", "first", "last", "order")
VOCABULARY = ("<pad>", "<end>", "<video>", "=", *"0123456789", *(f"{kind} " for kind in KINDS))
"""Token id -> text."""
PAD, END, VIDEO = range(3)
_TOKEN = {text: token for token, text in enumerate(VOCABULARY)}

FEWEST_FRAMES = 4
MOST_DIGITS = 5
BLANK = -1
"""Stands for the image of a frame that shows none."""


class VideoDigitsSource(DigitsSource):
    """Questions about one clip of handwritten digits each. Every digit is there for some frames; between two digits
    there are some frames without one. Four kinds, each as likely as the others:

    - `count`: how many digits come;
    - `first`, `last`: which one comes first, or last;
    - `order`: all of them, in their order.

    Splits and images are those of `DigitsSource`; in the train split every frame has noise of its own.

    Args:
        max_frames: the most frames that a clip has; each number from 4 on is as likely as every other.
        tail: above 0: most clips are short and a few very long, as in `DigitsSource`.

    Raises:
        RecipeError: an unknown split, `max_frames` below 4, or `tail` below 0.
    """

    vocabulary = VOCABULARY
    vocab_size = len(VOCABULARY)
    pad_id = PAD
    end_ids = (END,)
    placeholders = MappingProxyType({"video": VIDEO})
    prompt: Any = None  # it cannot be asked about files

    def __init__(self, split: str = "train", seed: int = 0, max_frames: int = 16, tail: float = 0.0) -> None:
        if max_frames < FEWEST_FRAMES:
            raise RecipeError(f"digits_video: max_frames must be at least {FEWEST_FRAMES}, got {max_frames}")
        super().__init__(split, seed, max_frames - FEWEST_FRAMES + 1, tail=tail)

    def _ask(self, index: int) -> Question:
        """Question `index`; its `images` are those of the clip's frames, `BLANK` among them. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"digits_video: index {index} is not in 0..{len(self) - 1}")
        draw = random.Random(f"{self.seed}/{self.split}/{index}/video").random
        kind = KINDS[int(draw() * len(KINDS))]
        frames = FEWEST_FRAMES - 1 + self._number(draw())
        number = 1 + int(draw() * min(MOST_DIGITS, (frames + 1) // 2))
        lengths = [0, *[1] * (2 * number - 1), 0]  # blank frames and frames of a digit in turns
        for _ in range(frames - sum(lengths)):
            lengths[int(draw() * len(lengths))] += 1
        pool = images_of(self.split)
        shown = [pool[int(draw() * len(pool))] for _ in range(number)]
        images = [image for digit in shown for image in (BLANK, digit)]
        digits = [str(data_set()[1][i]) for i in shown]
        answers = {"count": str(number), "first": digits[0], "last": digits[-1], "order": "".join(digits)}
        clip = np.repeat([*images, BLANK], lengths)
        return Question(kind, f"{kind} <video>=", answers[kind], tuple(clip.tolist()))

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`; the answer and the end token are the targets."""
        question = self.ask(index)
        tokens = 4 + len(question.answer)
        clip = MediaItem("video", (len(question.images), 1, 8, 8), 1)
        return SampleMeta(self._id(index), tokens, (clip,), targets=((3, tokens),))

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """Payload of sample `index`; its clip is float32 `[frames, 1, 8, 8]`, of values -1..1 before noise is added."""
        question = self.ask(index)
        answer = [_TOKEN[digit] for digit in question.answer]
        tokens = torch.tensor([_TOKEN[f"{question.kind} "], VIDEO, _TOKEN["="], *answer, END])
        if not wants(kinds, "video"):
            return Sample(self._id(index), tokens)
        pixels = _pixels(question.images).astype(np.float32)
        if self.split == "train":
            seed = random.Random(f"{self.seed}/{self.split}/{index}/video noise").getrandbits(32)
            pixels += np.random.RandomState(seed).uniform(-NOISE, NOISE, pixels.shape)  # whose numbers never change
        return Sample(self._id(index), tokens, {"video": (torch.from_numpy(pixels / 8 - 1).unsqueeze(1),)})

    def picture(self, index: int) -> str:
        """The clip's frames side by side as text art."""
        return text_art(_pixels(self.ask(index).images))

    def _id(self, index: int) -> str:
        return f"digits_video/{self.split}/{index}"


def _pixels(images: Sequence[int]) -> np.ndarray:
    """uint8 `[frames, 8, 8]`; a `BLANK` frame is paper."""
    shown = np.array(images)
    return np.where((shown == BLANK)[:, None, None], np.uint8(0), data_set()[0][shown])
