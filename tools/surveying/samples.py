"""Conversations with images and clips of unlike sizes, recordings of unlike lengths, and without."""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIZES = ((64, 96), (150, 75), (300, 200), (90, 90), (60, 180))
"""Heights and widths of images, in pixels."""
SECONDS = (0.5, 1.3, 0.9, 0.7)
RATE = 16000
CLIPS = ((8, 56, 84), (4, 84, 84), (6, 64, 112), (8, 90, 60))
"""Frames, heights and widths of videos."""
FRAMES_PER_SECOND = 2
SUFFIXES = {"image": "png", "video": "mp4", "audio": "wav"}


def write_samples(path: Path, kinds: Sequence[str], frames: int | None = None) -> list[str]:
    """Write conversations with media of `kinds` into the JSON file `path`, the media beside it.

    Args:
        frames: of each clip; None: of unlike numbers.

    Returns:
        What each has, the kinds of its items joined by `+`; `"text"` of one without.
    """
    draw = np.random.default_rng(3)
    contents: list[list[list[str]]] = []
    for kind in kinds:
        contents += [[[kind]], [[kind] * 3]]
    contents += [[[]], *([[kind], [], [kind]] for kind in kinds), *([[kind]] for kind in kinds)]
    if len(kinds) > 1:
        contents += [[list(kinds)], [[*kinds, *kinds]]]
    records, numbers = [], dict.fromkeys(kinds, 0)

    def item(kind: str) -> dict[str, str]:
        number = numbers[kind]
        numbers[kind] += 1
        name = f"{kind}_{number}.{SUFFIXES[kind]}"
        if kind == "video":
            write_clip(path.parent / name, number, draw, frames)
        else:
            (_write_image if kind == "image" else _write_recording)(path.parent / name, number, draw)
        return {"type": kind, kind: name}

    for i, turns in enumerate(contents):
        messages: list[dict[str, Any]] = []
        for number, of_turn in enumerate(turns):
            parts: list[dict[str, str]] = []
            for kind in of_turn:
                parts += [item(kind), {"type": "text", "text": " and "}]
            parts.append({"type": "text", "text": f"what is {i}?"})
            messages.append({"role": "user", "content": parts})
            messages.append({"role": "assistant", "content": f"it is {i * number}, or so" + "." * i})
        records.append({"id": f"sample {i}", "messages": messages})
    path.write_text(json.dumps(records), encoding="utf-8")
    return ["+".join(kind for turn in turns for kind in turn) or "text" for turns in contents]


def _write_image(path: Path, number: int, draw: np.random.Generator) -> None:
    from PIL import Image

    height, width = SIZES[number % len(SIZES)]
    Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)


def write_clip(path: Path, number: int, draw: np.random.Generator, frames: int | None) -> None:
    """Write a video of random pixels."""
    import av

    count, height, width = CLIPS[number % len(CLIPS)]
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("mpeg4", rate=FRAMES_PER_SECOND)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for _ in range(frames or count):
            pixels = np.kron(draw.integers(0, 256, (height // 2, width // 2, 3)), np.ones((2, 2, 1))).astype(np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        file.mux(stream.encode())


def _write_recording(path: Path, number: int, draw: np.random.Generator) -> None:
    samples = draw.normal(size=int(SECONDS[number % len(SECONDS)] * RATE)) * 3000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.astype("<i2").tobytes())
