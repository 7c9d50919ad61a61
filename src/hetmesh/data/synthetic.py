"""Sources without files: random samples of realistic sizes, to size a run before there is data, and given samples."""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hetmesh.data.source import Sample, check_meta, check_sample, wants
from hetmesh.errors import RecipeError
from hetmesh.graph.sample import MediaItem, SampleMeta


class SyntheticSource:
    """Samples of random length with images among random tokens. Sample `index` is a pure function of `(seed, index)`.

    Lengths of text are log-uniform: many short samples and some long ones, as in instruction data. The last third of a
    sample's text is its answer and carries loss; images come before it.

    Args:
        image_token: the placeholder's token id, of `vocab_size` ones.
        image_shape: `(channels, height, width)` of every image.
        processor: a Hugging Face directory whose processor prepares images of that height and width, all in one place
            of a sample; its token stands for them. Without one they are tensors, of a token each.
        max_images: most images of a sample.
        text_only: share of samples without an image.
        text_tokens: shortest and longest text.
        length: samples in the source; another `seed` gives others.
    """

    pad_id = 0

    def __init__(
        self,
        vocab_size: int = 151936,
        image_token: int = 151655,
        image_shape: Sequence[int] = (3, 384, 384),
        processor: str | None = None,
        max_images: int = 4,
        text_only: float = 0.1,
        text_tokens: Sequence[int] = (32, 2048),
        length: int = 1_000_000,
        seed: int = 0,
    ) -> None:
        self.vocab_size, self.image_shape, self.length, self.seed = vocab_size, tuple(image_shape), length, seed
        self.max_images, self.text_only, self.text_tokens = max_images, text_only, tuple(text_tokens)
        self.placeholders, self.processor = {"image": image_token}, processor
        self._made = dict[int, tuple[SampleMeta, Sample]]()
        key = "[data.options]"
        if len(self.image_shape) != 3 or min(self.image_shape) < 1:
            raise RecipeError(f"{key} image_shape: must be channels, height and width, got {list(self.image_shape)}")
        if len(self.text_tokens) != 2 or not 3 <= self.text_tokens[0] <= self.text_tokens[1]:
            raise RecipeError(
                f"{key} text_tokens: must be the shortest (at least 3) and the longest text, got {list(text_tokens)}"
            )
        if not 0 <= text_only <= 1:
            raise RecipeError(f"{key} text_only: must be in 0..1, got {text_only}")
        for name, value, least in (("max_images", max_images, 0), ("length", length, 1), ("vocab_size", vocab_size, 3)):
            if not isinstance(value, int) or value < least:
                raise RecipeError(f"{key} {name}: must be at least {least}, got {value}")
        if processor is not None:
            from hetmesh.models.split.processor import processor_at

            self.placeholders = {"image": processor_at(Path(processor), f"{key} processor").row_tokens["image"]}

    def __len__(self) -> int:
        return self.length

    def _prepared(self, images: int) -> tuple[SampleMeta, Sample]:
        """So many images without content as a sample of their own, as the processor makes it."""
        if images not in self._made:
            from hetmesh.data.preparation import placed_items
            from hetmesh.models.split.processor import processor_at

            key = "[data.options] processor"
            processor = processor_at(Path(str(self.processor)), key)
            blanks = [processor.blank("image", self.image_shape[1:])] * images
            try:
                made = processor(f"{processor.written('image')} and " * images, {"image": blanks} if images else {})
            except Exception as error:  # whatever a processor raises
                raise RecipeError(f"{key} = {self.processor!r} does not take {images} images: {error}") from error
            media = placed_items("synthetic", processor, made, ["image"] * images)
            rows = {kind: sum(item.rows for item in media) for kind in made.units}
            sample = Sample("synthetic", torch.tensor(made.ids), units=made.units, unit_rows=rows)
            self._made[images] = SampleMeta("synthetic", len(made.ids), media), sample
        return self._made[images]

    def meta(self, index: int) -> SampleMeta:
        """Lengths and places of sample `index`. Raises IndexError: `index` is not in `0..len(self)-1`."""
        if not 0 <= index < self.length:
            raise IndexError(f"synthetic: index {index} is not in 0..{self.length - 1}")
        # Of random.Random only random() is promised to give the same numbers in every Python version.
        draw = random.Random(f"{self.seed}/{index}").random
        shortest, longest = self.text_tokens
        text = round(shortest * (longest / shortest) ** draw())
        images = 0 if draw() < self.text_only else min(self.max_images, 1 + int(draw() * self.max_images))
        question, tokens = text - text // 3, text + images
        # in ascending order, each shifted by the placeholders before it
        positions = sorted(int(draw() * (question - 1)) for _ in range(images))
        media = tuple(MediaItem("image", self.image_shape, at + i) for i, at in enumerate(positions))
        if self.processor is not None and images:
            prepared, at = self._prepared(images)[0], positions[0]
            media = tuple(
                replace(i, position=i.position + at, runs=tuple((start + at, rows) for start, rows in i.runs))
                for i in prepared.media
            )
            images, tokens = prepared.tokens, text + prepared.tokens
        return SampleMeta(f"synthetic-{self.seed}-{index}", tokens, media, ((question + images, tokens),))

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """Random tokens and images that fit `meta(index)`."""
        meta = self.meta(index)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{index}".encode()))
        image = self.placeholders["image"]
        tokens = torch.randint(1, self.vocab_size - 1, (meta.tokens,), generator=generator)
        tokens += tokens >= image  # every id but the placeholder's, which may only stand where an image is
        if self.processor is not None and meta.media:
            known, made = self._prepared(len(meta.media))
            start = meta.media[0].position - known.media[0].position
            tokens[start : start + known.tokens] = made.tokens
            unit = {
                key: torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
                for key, value in made.units["image"].items()
            }
            return replace(made, id=meta.id, tokens=tokens, units={"image": unit} if wants(kinds, "image") else {})
        tokens[[item.position for item in meta.media]] = image
        items = meta.media if wants(kinds, "image") else ()
        images = [torch.randn(item.shape, generator=generator) for item in items]
        return Sample(meta.id, tokens, {"image": images} if images else {})


class MemorySource:
    """A source of samples given as metadata and payload. Forked worker processes share them; others get a copy. Raises
    SampleError: a sample is malformed, or its payload and metadata disagree."""

    def __init__(
        self,
        samples: Sequence[tuple[SampleMeta, Sample]],
        vocab_size: int,
        placeholders: Mapping[str, int],
        pad_id: int = 0,
    ) -> None:
        self.vocab_size, self.pad_id, self.placeholders = vocab_size, pad_id, dict(placeholders)
        for meta, sample in samples:
            check_meta(meta)
            check_sample(sample, meta, placeholders)
        self._samples = tuple(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def meta(self, index: int) -> SampleMeta:
        return self._samples[index][0]

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        sample = self._samples[index][1]
        media = {kind: items for kind, items in sample.media.items() if wants(kinds, kind)}
        return replace(sample, media=media, units={kind: u for kind, u in sample.units.items() if wants(kinds, kind)})
