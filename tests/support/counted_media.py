"""A data source with given numbers of images and targets, for cases that name them."""

import random
from collections.abc import Sequence

import torch

from hetmesh.data.sample_order import permuted
from hetmesh.data.source import Sample
from hetmesh.graph import MediaItem, SampleMeta
from hetmesh.testing.sources import RandomMedia


class CountedMedia(RandomMedia):
    """As many samples as `items`; the batches of the first epoch (loader seed 0) hold them in that order.

    Args:
        kinds: kind of media -> raw shape.
        items: items of every kind, per sample.
        targets: tokens that carry loss, per sample, repeated from the start.
    """

    def __init__(self, kinds, items: Sequence[int], targets: Sequence[int] = (2,)) -> None:
        super().__init__(kinds, length=len(items))
        order = permuted(range(len(items)), len(items), 0, 0)
        self.items_of = dict(zip(order, items, strict=True))
        self.targets_of = {index: targets[at % len(targets)] for at, index in enumerate(order)}

    def _make(self, index: int) -> tuple[SampleMeta, Sample]:
        rng = random.Random(index)
        generator = torch.Generator().manual_seed(index)
        names = [name for name in self.kinds for _ in range(self.items_of[index])]
        text, targets = 2 + rng.randrange(3), self.targets_of[index]
        first = len(self.placeholders) + 1
        words = [rng.randrange(first, self.vocab_size) for _ in range(text + targets)]
        tokens = torch.tensor([words[0], *(self.placeholders[name] for name in names), *words[1:]])
        media = tuple(MediaItem(name, self.kinds[name], 1 + at) for at, name in enumerate(names))
        payload = {
            name: [torch.randn(shape, generator=generator) for _ in range(self.items_of[index])]
            for name, shape in self.kinds.items()
        }
        name = f"counted-{index}"
        return SampleMeta(name, len(tokens), media, ((len(tokens) - targets, len(tokens)),)), Sample(
            name, tokens, payload
        )
