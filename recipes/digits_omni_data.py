"""The demo with two encoders: digits as handwritten images or as the tones of a telephone's keys."""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Sequence
from types import MappingProxyType

import numpy as np
import torch

from hetmesh.data.digits import IMAGE, VOCABULARY, DigitsSource, data_set
from hetmesh.data.source import Sample, wants
from hetmesh.errors import RecipeError
from hetmesh.graph.sample import MediaItem, SampleMeta

AUDIO = len(VOCABULARY)
"""The placeholder of a recording, after the vocabulary of the digits."""

ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)
"""Hz: a key sounds with the tone of its row and that of its column (ITU-T Q.23)."""
PAIRS = ((941, 1336), *((row, column) for row in ROWS[:3] for column in COLUMNS))
"""Hz of the digits 0 to 9."""

RATE, WINDOW, HOP = 8000, 512, 128  # Hz and samples
BINS, FRAMES = 32, 8
"""Shape of a recording's log-mel features."""
LOWEST, HIGHEST = 500.0, 1800.0  # Hz of the mel bands
QUIETEST, LOUDEST = 0.3, 1.0  # amplitude of each tone
NOISE = 1.0
"""Standard deviation of the white noise, which is thus louder than most tones."""


class OmniDigitsSource(DigitsSource):
    """The questions of `DigitsSource`, each digit given as an image or as the tone pair of its key on a telephone,
    made when it is loaded, with noise; `tones` is the share of the digits that are tones."""

    vocab_size = len(VOCABULARY) + 1
    placeholders = MappingProxyType({"image": IMAGE, "audio": AUDIO})

    def __init__(self, split: str = "train", seed: int = 0, max_images: int = 6, tones: float = 0.5) -> None:
        super().__init__(split, seed, max_images)
        if not 0 <= tones <= 1:
            raise RecipeError(f"digits_omni: tones must be in 0..1, got {tones}")
        self.tones = tones

    def heard(self, index: int) -> tuple[bool, ...]:
        """Which of the digits of question `index` are tones."""
        draw = random.Random(f"{self.seed}/{self.split}/{index}/tones").random
        return tuple(draw() < self.tones for _ in self.ask(index).images)

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`; images are `[1, 8, 8]`, recordings `[BINS, FRAMES]`."""
        meta = super().meta(index)
        media = tuple(
            MediaItem("audio", (BINS, FRAMES), item.position) if heard else item
            for item, heard in zip(meta.media, self.heard(index), strict=True)
        )
        return SampleMeta(meta.id, meta.tokens, media, meta.targets)

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """Payload of sample `index`; images as `DigitsSource` makes them, recordings float32."""
        heard = self.heard(index)
        sample = super().load(index, kinds)
        tokens = sample.tokens.clone()
        places = torch.nonzero(tokens == IMAGE).flatten()
        tokens[places[torch.tensor(heard, dtype=torch.bool)]] = AUDIO
        images = [image for image, tone in zip(sample.media.get("image", ()), heard, strict=False) if not tone]
        media: dict[str, list[torch.Tensor]] = {"image": images} if images else {}
        if wants(kinds, "audio"):
            seed = random.Random(f"{self.seed}/{self.split}/{index}/tone noise").getrandbits(32)
            draw = np.random.RandomState(seed)  # whose numbers never change
            digits = [int(data_set()[1][i]) for i in self.ask(index).images]
            tones = [torch.from_numpy(recording(digit, draw)) for digit, h in zip(digits, heard, strict=True) if h]
            if tones:
                media["audio"] = tones
        return Sample(sample.id, tokens, media)

    def kind(self, index: int) -> str:
        """What is asked, and in what form digits come: `read`, `sum` or `add`, `images`, `tones` or `both`."""
        heard = self.heard(index)
        form = "" if not heard else " tones" if all(heard) else " both" if any(heard) else " images"
        return super().kind(index) + form

    def question(self, index: int) -> str:
        """The text of the question, with `<image>` or `<audio>` for each digit."""
        first, *rest = super().question(index).split("<image>")
        marks = ["<audio>" if heard else "<image>" for heard in self.heard(index)]
        return first + "".join(mark + text for mark, text in zip(marks, rest, strict=True))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids up to the first end token."""
        return super().decode(tokens).replace(f"<{AUDIO}?>", "<audio>")


def recording(digit: int, draw: np.random.RandomState) -> np.ndarray:
    """Log-mel features of the key of a digit in noise, float32 `[BINS, FRAMES]`, about -1..1."""
    times = np.arange(WINDOW + HOP * (FRAMES - 1)) / RATE
    wave = draw.normal(0, NOISE, len(times))
    for hertz in PAIRS[digit]:
        amplitude = QUIETEST + (LOUDEST - QUIETEST) * draw.random_sample()
        wave += amplitude * np.sin(2 * np.pi * (hertz * times + draw.random_sample()))
    frames = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[::HOP] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    return (np.log10(np.maximum(power @ _bands(), 1e-3)) / 2 - 1).T.astype(np.float32)


@functools.cache
def _bands() -> np.ndarray:
    """Triangular mel bands, `[WINDOW // 2 + 1, BINS]`, each of area 1."""
    low, high = (2595 * np.log10(1 + hertz / 700) for hertz in (LOWEST, HIGHEST))
    edges = 700 * (10 ** (np.linspace(low, high, BINS + 2) / 2595) - 1)
    hertz = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    rising, falling = (hertz - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - hertz) / np.diff(edges)[1:]
    bands = np.maximum(0, np.minimum(rising, falling))
    return bands / bands.sum(0)
