"""Length laws: how large samples are, per module, and how the modules' sizes hang together.

A law draws a batch: per module the rows of each sample and the (query, key) pairs that its attention sees, from a
generator of random numbers and from how far the run is (0 to 1, for the one that drifts).

Sources. The caps of 4,096 and 16k patches are those of native-resolution towers (Qwen2-VL, arXiv 2409.12191, cuts
images at 16,384 patches of 14 pixels; 4,096 is a usual setting of it). The medians and spreads of `chart`, `chat`,
`caption`, `heavy` and `anti` are not fitted to anything: they are round numbers of the kind that each name describes.
Tiles: the shares of 1, 3, 4 and 5 tiles of 448 pixels, 256 tokens per tile, the correlation of 0.95 and the text's mean
of 124 are published for four document and chart sets (issue "Balance", InternVL's tiling, arXiv 2312.14238). Mixture:
encoded means of 3.8k and 1.4k tokens per image set, 0.34k of text and 6k of audio (17.6 times the text), shares that
drift from 52/41/7% to 35/55/10%, as published for one training run; its third kind is taken as audio here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Rows = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Module -> rows and pairs of each sample, int64 `[samples]`."""
Law = Callable[[int, np.random.Generator, float], Rows]

MERGE = 4  # patches that become one token of the LLM
AUDIO_MERGE = 2
AUDIO_WINDOW = 1500  # frames that attend to each other (Whisper: 30 seconds)


def _lognormal(rng: np.random.Generator, count: int, median: float, spread: float, low: int, cap: int) -> np.ndarray:
    drawn = median * np.exp(spread * rng.standard_normal(count))
    return np.clip(drawn, low, cap).astype(np.int64)


def whole(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that all attend to each other."""
    return rows, rows * rows


def _both(patches: np.ndarray, text: np.ndarray) -> Rows:
    return {"vision": whole(patches), "llm": whole(patches // MERGE + text)}


def chart(cap: int) -> Law:
    """Wide and correlated: charts of any size, whose text grows with them."""

    def law(count: int, rng: np.random.Generator, progress: float) -> Rows:
        patches = _lognormal(rng, count, 1100, 0.9, 64, cap)
        text = patches / 4 * np.exp(0.25 * rng.standard_normal(count))
        return _both(patches, text.astype(np.int64) + _lognormal(rng, count, 90, 0.8, 8, 4096))

    return law


def chat(count: int, rng: np.random.Generator, progress: float) -> Rows:
    """Photographs of a few sizes, answers of any length."""
    return _both(_lognormal(rng, count, 1500, 0.25, 256, 4096), _lognormal(rng, count, 250, 0.9, 16, 8192))


def caption(count: int, rng: np.random.Generator, progress: float) -> Rows:
    """Narrow: photographs and one sentence."""
    return _both(_lognormal(rng, count, 1024, 0.15, 256, 4096), _lognormal(rng, count, 25, 0.3, 5, 200))


def heavy(count: int, rng: np.random.Generator, progress: float) -> Rows:
    """Independent heavy tails: the size of an image says nothing about its text."""
    return _both(_lognormal(rng, count, 900, 1.1, 64, 16384), _lognormal(rng, count, 400, 1.1, 16, 8192))


def anti(count: int, rng: np.random.Generator, progress: float) -> Rows:
    """Anti-correlated: small images come with long texts."""
    normal = rng.standard_normal(count)
    patches = np.clip(1000 * np.exp(0.8 * normal), 64, 8192).astype(np.int64)
    text = np.clip(500 * np.exp(-0.8 * normal + 0.3 * rng.standard_normal(count)), 16, 8192)
    return _both(patches, text.astype(np.int64))


def some_text(count: int, rng: np.random.Generator, progress: float) -> Rows:
    """As chart-4k, but 40% of the samples are text alone."""
    drawn = chart(4096)(count, rng, progress)
    alone = rng.random(count) < 0.4
    patches = np.where(alone, 0, drawn["vision"][0])
    text = np.where(alone, _lognormal(rng, count, 600, 0.8, 16, 4096), drawn["llm"][0])
    return {"vision": whole(patches), "llm": whole(text)}


def tiles(count: int, rng: np.random.Generator, progress: float) -> Rows:
    """Tiles of 448 pixels (1,024 patches of 14 pixels, 256 tokens), each attending to itself alone."""
    number = rng.choice([1, 3, 4, 5], count, p=[0.09, 0.34, 0.01, 0.56])
    text = rng.gamma(1.25, 98.8, count).astype(np.int64) + 1  # mean 124, as wide as the correlation of 0.95 says
    return {"vision": (1024 * number, 1024 * 1024 * number), "llm": whole(256 * number + text)}


def mixture(count: int, rng: np.random.Generator, progress: float) -> Rows:
    """Text, images and audio, whose shares drift."""
    shares = (1 - progress) * np.array([0.52, 0.41, 0.07]) + progress * np.array([0.35, 0.55, 0.10])
    kind = rng.choice(3, count, p=shares)
    text = rng.exponential(340, count).astype(np.int64) + 1
    mean = np.where(rng.random(count) < 0.5, 3800, 1400)
    image = np.where(kind == 1, mean * np.exp(0.5 * rng.standard_normal(count) - 0.125), 0).astype(np.int64)
    sound = np.where(kind == 2, 6000 * np.exp(0.5 * rng.standard_normal(count) - 0.125), 0).astype(np.int64)
    image, sound = np.minimum(image, 4096), np.minimum(sound, 16384)
    patches, frames = MERGE * image, AUDIO_MERGE * sound
    return {
        "vision": whole(patches),
        "audio": (frames, frames * np.minimum(frames, AUDIO_WINDOW)),
        "llm": whole(text + image + sound),
    }


LAWS: Mapping[str, Law] = {
    "chart-4k": chart(4096),
    "chart-16k": chart(16384),
    "chat": chat,
    "caption": caption,
    "heavy": heavy,
    "anti": anti,
    "text-40": some_text,
    "tiles": tiles,
    "mixture": mixture,
}
CHARTS = ("chart-4k", "chart-16k")
