"""The demo source: questions about real handwritten digits, made on the fly from 1,797 images (see README.md)."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from hetmesh.data.images import load_upright, open_image
from hetmesh.data.source import Sample, SourceAbilities, wants
from hetmesh.data.stores.store import MALFORMED_FILE, FileSpan
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta

SPECIAL = ("<pad>", "<end>", "<image>")
VOCABULARY = (*SPECIAL, *" +=0123456789adermsu")
"""Token id -> text. Every character that a question or answer can hold is one token."""
PAD, END, IMAGE = range(len(SPECIAL))
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DRAWING_VOCABULARY = (*VOCABULARY, "<image_out>", *"fghinotvwxz")
"""That of a source with drawings: what these need comes after all others."""
IMAGE_OUT = len(VOCABULARY)
_TOKEN = {text: token for token, text in enumerate(DRAWING_VOCABULARY)}

HELD_OUT_IMAGES = 360
"""Images of the validation split, about one in five, drawn once for all seeds."""
SIDE = 8  # pixels of an image
MAX_READ = 6
SUM_IMAGES = 2
MAX_ADDEND = 19
HELD_OUT_ADDITIONS = 5
"""One in five additions is asked in the validation split only."""
KINDS = ("read", "sum", "add")
WEIGHTS = (0.4, 0.3, 0.3)
"""Share of each kind among the questions."""
NOISE = 3.5
"""The train split adds to each pixel (0..16) a number drawn uniformly from -NOISE..NOISE. 1,437 images are few: without
noise a small encoder learns them by heart and reads fewer held-out ones (0.90 against 0.97 of the `read` questions
after 800 steps of 64 questions)."""
_BOUNDS = tuple(itertools.accumulate(WEIGHTS[:-1]))
LENGTHS = MappingProxyType({"train": 1_000_000, "validation": 384})


@dataclass(frozen=True)
class Question:
    """One question: `images` are indices into the data set, of which each image shows as many, side by side, as
    `strips` says; `text` has one `<image>` for each of those. `drawn`: the image that is the answer of a `draw`."""

    kind: str
    text: str
    answer: str
    images: tuple[int, ...] = ()
    strips: tuple[int, ...] = ()
    drawn: tuple[int, ...] = ()


class DigitsSource:
    """Questions over 0 to 6 images of handwritten digits. Four kinds:

    - `read`: write down the digits of 1 to 6 images;
    - `sum`: the sum of the digits of 2 images;
    - `add`: the sum of two written numbers; no image;
    - `draw`: an image of the digit that is asked for ("draw a seven"): of kind `image_out`, in the answer's place, with
      no target token. Only with `draw` above 0.

    Sample `index` is a pure function of `(seed, split, index)`. The train split is a stream of 1,000,000 random
    questions, their images a little noisy. The validation split is 384 questions over images as they are; the train
    split of no seed uses any of these images, or asks any of these additions.

    Args:
        max_images: the most images that a `read` question has.
        max_strip: the most digits side by side in one image: 1 gives 8x8 images, more gives images of 8x8 to 8 x 8
            `max_strip` pixels, as many as it takes to show the question's digits, cut at random.
        tail: 0: every number of images up to `max_images` is as likely as every other; above 0: more than x of them
            come with probability 1 / (x + 1) ** tail (Pareto), so that most questions are short and a few very long.
        draw: the share of the samples in which a digit is drawn. Above 0 there are more tokens, and other questions.

    Raises:
        RecipeError: an unknown split, `max_images` or `max_strip` below 1, `tail` below 0, or `draw` outside 0..1.
    """

    vocabulary: Sequence[str] = VOCABULARY
    vocab_size = len(VOCABULARY)
    pad_id = PAD
    end_ids = (END,)
    placeholders: Mapping[str, int] = MappingProxyType({"image": IMAGE})

    def __init__(
        self,
        split: str = "train",
        seed: int = 0,
        max_images: int = MAX_READ,
        max_strip: int = 1,
        tail: float = 0.0,
        draw: float = 0.0,
    ) -> None:
        if split not in LENGTHS:
            raise RecipeError(f"digits: there is no split {split!r}; valid are {sorted(LENGTHS)}")
        if max_images < 1:
            raise RecipeError(f"digits: max_images must be at least 1, got {max_images}")
        if max_strip < 1:
            raise RecipeError(f"digits: max_strip must be at least 1, got {max_strip}")
        if not (0 <= tail < math.inf):
            raise RecipeError(f"digits: tail must be a number from 0 on, got {tail}")
        if not 0 <= draw <= 1:
            raise RecipeError(f"digits: draw must be a share from 0 to 1, got {draw}")
        if draw:
            self.vocabulary, self.vocab_size = DRAWING_VOCABULARY, len(DRAWING_VOCABULARY)
            self.placeholders = MappingProxyType({"image": IMAGE, "image_out": IMAGE_OUT})
        self.max_images, self.max_strip, self.tail, self.draw = max_images, max_strip, tail, draw
        self.split, self.seed = split, seed
        # Metadata and payload of a question are asked for one after the other.
        self.ask = functools.lru_cache(maxsize=4096)(self._ask)

    def __len__(self) -> int:
        return LENGTHS[self.split]

    def _ask(self, index: int) -> Question:
        """Question `index`. Raises IndexError: `index` is not in `0..len(self)-1`."""
        if not 0 <= index < len(self):
            raise IndexError(f"digits: index {index} is not in 0..{len(self) - 1}")
        # Of random.Random only random() is promised to give the same numbers in every Python version.
        draw = random.Random(f"{self.seed}/{self.split}/{index}").random
        if self.draw and draw() < self.draw:
            pool = images_of(self.split)
            image = pool[int(draw() * len(pool))]
            return Question("draw", f"{_request(int(data_set()[1][image]))}=", "", drawn=(image,))
        kind = KINDS[bisect.bisect(_BOUNDS, draw())]
        if kind == "add":
            pairs = _additions(self.split)
            a, b = pairs[int(draw() * len(pairs))]
            return Question(kind, f"add {a}+{b}=", str(a + b))
        number = SUM_IMAGES if kind == "sum" else self._number(draw())
        pool = images_of(self.split)
        images = tuple(pool[int(draw() * len(pool))] for _ in range(number))
        digits = [int(data_set()[1][i]) for i in images]
        answer = str(sum(digits)) if kind == "sum" else "".join(map(str, digits))
        strips: list[int] = []  # how many of the digits each image shows
        while (rest := number - sum(strips)) > 0:
            strips.append(min(rest, 1 + int(draw() * self.max_strip) if self.max_strip > 1 else 1))
        return Question(kind, f"{kind} {'<image>' * len(strips)}=", answer, images, tuple(strips))

    def _number(self, drawn: float) -> int:
        """How many images a `read` question has, from a number drawn uniformly from 0 to 1."""
        if self.tail:
            power = min(-math.log1p(-drawn) / self.tail, math.log(self.max_images + 1))
            return min(int(math.exp(power)), self.max_images)
        return 1 + int(drawn * self.max_images)

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`; the answer and the end token are the targets."""
        question = self.ask(index)
        prompt = len(_encode(question.text))
        if question.drawn:
            return _drawing(self._id(index), prompt)
        tokens = prompt + len(question.answer) + 1
        first = len(question.kind) + 1
        media = tuple(MediaItem("image", (1, 8, 8 * n), first + i) for i, n in enumerate(question.strips))
        return SampleMeta(self._id(index), tokens, media, targets=((prompt, tokens),))

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """Payload of sample `index`; each image is float32 `[1, 8, 8 * digits]`, of -1..1 before noise is added."""
        question = self.ask(index)
        if question.drawn:
            tokens = torch.tensor([*_encode(question.text), IMAGE_OUT])
            drawn = torch.from_numpy(data_set()[0][list(question.drawn)].astype(np.float32) / 8 - 1)
            return Sample(self._id(index), tokens, {"image_out": (drawn,)} if wants(kinds, "image_out") else {})
        tokens = torch.tensor([*_encode(question.text), *_encode(question.answer), END])
        if not wants(kinds, "image"):
            return Sample(self._id(index), tokens)
        pixels = data_set()[0][list(question.images)].astype(np.float32)
        if self.split == "train":
            draw = random.Random(f"{self.seed}/{self.split}/{index}/noise").random
            pixels += NOISE * np.array([2 * draw() - 1 for _ in range(pixels.size)], np.float32).reshape(pixels.shape)
        digits = torch.from_numpy(pixels / 8 - 1).unsqueeze(1)
        strips = digits.split(question.strips) if len(digits) else ()
        images = tuple(torch.cat(strip.unbind(), dim=-1) for strip in strips)
        return Sample(self._id(index), tokens, {"image": images})

    def kind(self, index: int) -> str:
        return self.ask(index).kind

    def question(self, index: int) -> str:
        """The text of the question, with `<image>` for each image."""
        return self.ask(index).text

    def answer(self, index: int) -> str:
        return self.ask(index).answer

    def picture(self, index: int) -> str:
        """The question's images side by side as text art, or that which is drawn; empty without images."""
        question = self.ask(index)
        return text_art(data_set()[0][list(question.images + question.drawn)])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids up to the first end token; a token outside the vocabulary shows as `<7?>`."""
        texts = self.vocabulary
        known = [texts[t] if 0 <= t < len(texts) else f"<{t}?>" for t in map(int, tokens)]
        return "".join(known[: known.index("<end>")] if "<end>" in known else known)

    @property
    def abilities(self) -> SourceAbilities:
        judge = self.judge if self.draw else None
        return SourceAbilities(decode=self.decode, end_ids=lambda: self.end_ids, judge=judge)

    def prompt(self, text: str, media: Sequence[tuple[str, Path]]) -> tuple[SampleMeta, Sample]:
        """A question as those of the source: `read`, `sum` (of 2 images), `add 3+4`, or `draw a seven`, behind which an
        empty image stands for the answer. Images become 8x8 (see `read_digit`); without `<image>` in the text they
        follow its first word, as they do in the source. Raises SampleError: a character that no question has, a drawing
        of what is no digit, another number of images, or a file that is none."""
        if other := sorted({kind for kind, _ in media} - {"image"}):
            raise SampleError(f"digits: questions have images, no {other[0]!r}")
        asked = text.strip().removesuffix("=")
        if media and "<image>" not in asked:
            asked = f"{asked} {'<image>' * len(media)}"
        if self.draw and asked.partition(" ")[0] == "draw":
            return self._drawing_prompt(asked)
        if wrong := sorted(set(asked.replace("<image>", "")) - set(self.vocabulary)):
            raise SampleError(
                f"digits: no question has the character {wrong[0]!r}; ask 'read' or 'sum' of images, or 'add 3+4'"
                + (" or 'draw a seven'" if self.draw else "")
            )
        if not media and asked.partition(" ")[0] in ("read", "sum"):
            raise SampleError(f"digits: {asked!r} is about images, and none is given: --image FILE")
        tokens = torch.tensor(_encode(asked + "="))
        places = torch.nonzero(tokens == IMAGE).flatten().tolist()
        if len(places) != len(media):
            raise SampleError(f"digits: the question has {len(places)} places for images, given are {len(media)}")
        images = tuple(read_digit(path) for _, path in media)
        items = tuple(MediaItem("image", tuple(i.shape), at) for i, at in zip(images, places, strict=True))
        return SampleMeta("question", len(tokens), items), Sample("question", tokens, {"image": images})

    def _drawing_prompt(self, asked: str) -> tuple[SampleMeta, Sample]:
        if asked not in (requests := [_request(digit) for digit in range(10)]):
            raise SampleError(f"digits: {asked!r} is no drawing that it knows; valid are {requests}")
        tokens = torch.tensor([*_encode(f"{asked}="), IMAGE_OUT])
        empty = torch.zeros(1, SIDE, SIDE)
        return _drawing("question", len(tokens) - 1), Sample("question", tokens, {"image_out": (empty,)})

    def judge(self, index: int, item: torch.Tensor) -> bool:
        """Whether `item`, float `[1, 8, 8]`, shows what the drawing `index` asks for (see `read_by_judge`)."""
        return bool(read_by_judge(item.numpy(force=True))[0] == data_set()[1][self.ask(index).drawn[0]])

    def _id(self, index: int) -> str:
        return f"digits/{self.split}/{index}"


def read_digit(path: Path) -> torch.Tensor:
    """An image file as float32 `[1, 8, 8]`, values -1 (paper) to 1 (ink), as the demo's own images are.

    The colour at the border is paper, what differs from it most is ink: black on white or white on black. An image of
    another size is averaged over 8x8 fields. Raises SampleError: the file cannot be read, or is of one colour."""
    from PIL import Image

    try:
        with FileSpan(path).open() as file, open_image(file) as image:
            load_upright(image)
            pixels = np.asarray(image.convert("L"), np.float32)
            border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
            ink = np.abs(pixels - np.median(border))
            if ink.max() == 0:
                raise SampleError(f"{path}: the image has one colour, there is no digit in it")
            small = Image.fromarray(ink / ink.max()).resize((SIDE, SIDE), Image.Resampling.BOX)
    except (OSError, ValueError, Image.DecompressionBombError, *MALFORMED_FILE) as error:
        if isinstance(error, SampleError):
            raise
        raise SampleError(f"{path} cannot be read as an image: {error or type(error).__name__}") from error
    return torch.from_numpy(np.array(small) * 2 - 1).unsqueeze(0)


def text_art(images: np.ndarray) -> str:
    """Images `[n, height, width]` with values 0..16 side by side, two characters per pixel; empty without images."""
    if len(images) == 0:
        return ""
    shades = np.array(list(" .:-=+*#%@"))
    pixels = shades[images.astype(int) * (len(shades) - 1) // 16].repeat(2, axis=2)
    return "\n".join("  ".join("".join(row) for row in rows) for rows in pixels.swapaxes(0, 1))


@functools.cache
def data_set() -> tuple[np.ndarray, np.ndarray]:
    """The shipped images, uint8 `[1797, 8, 8]` with values 0..16, and their labels, uint8 `[1797]`."""
    with files("hetmesh.data").joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        return archive["images"], archive["labels"]


@functools.cache
def images_of(split: str) -> tuple[int, ...]:
    """Images that questions of a split may show. The order is that of a hash, the same for every seed."""
    order = sorted(range(len(data_set()[1])), key=lambda i: random.Random(f"image/{i}").random())
    return tuple(order[:HELD_OUT_IMAGES] if split == "validation" else order[HELD_OUT_IMAGES:])


def read_by_judge(digits: np.ndarray) -> np.ndarray:
    """What each of `digits`, float `[n, 8, 8]` of -1..1, shows: the label of the nearest image of the validation split.

    Of the 1,437 real digits of the train split, of which it has seen none, it reads 0.971 correctly."""
    images, labels = data_set()
    known = list(images_of("validation"))
    apart = digits[:, None] - (images[known] / 8 - 1)
    return labels[known][np.square(apart).sum((2, 3)).argmin(1)]


def _request(digit: int) -> str:
    return f"draw {'an' if WORDS[digit] == 'eight' else 'a'} {WORDS[digit]}"


def _drawing(name: str, prompt: int) -> SampleMeta:
    """A question of `prompt` tokens, and an image as its answer."""
    return SampleMeta(name, prompt + 1, (MediaItem("image_out", (1, SIDE, SIDE), prompt),))


@functools.cache
def _additions(split: str) -> tuple[tuple[int, int], ...]:
    """Pairs that additions of a split may ask. Pairs are ordered: 3+8 may be trained on where 8+3 is held out."""
    numbers = range(MAX_ADDEND + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    held_out = [random.Random(f"add/{a}/{b}").random() < 1 / HELD_OUT_ADDITIONS for a, b in pairs]
    return tuple(pair for pair, out in zip(pairs, held_out, strict=True) if out == (split == "validation"))


def _encode(text: str) -> list[int]:
    """Tokens of a text in which `<image>` stands for the placeholder."""
    tokens: list[int] = []
    for i, part in enumerate(text.split("<image>")):
        tokens += [IMAGE] * (i > 0) + [_TOKEN[c] for c in part]
    return tokens
