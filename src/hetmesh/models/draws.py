"""What losses draw at random, per sample: equal in every layout, whatever lane, microbatch or rank handles it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

EVALUATION = -1
"""In place of a step's number: evaluations draw the same each time."""


@dataclass(frozen=True)
class Draws:
    """Those of one step. A stream of its own for each module and sample, by (seed, step, module, sample id): a counter
    generator (Philox: Salmon et al., SC 2011) is keyed by their hash, so that no order matters."""

    seed: int
    step: int

    def of(
        self, module: str, ids: Sequence[str], items: Sequence[int], rows: Sequence[int], features: int
    ) -> dict[str, Tensor]:
        """For samples in their order, with the media items of each, and its rows of targets.

        Returns:
            `noise`: float64 `[rows of all, features]`, standard normal. `time`: float64 `[items of all]`, uniform in
            [0, 1).
        """
        noise, times = [np.zeros((0, features))], [np.zeros(0)]
        for sample, count, length in zip(ids, items, rows, strict=True):
            key = hashlib.sha256(f"{self.seed}/{self.step}/{module}/{sample}".encode()).digest()
            generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
            times.append(generator.random(count))
            noise.append(generator.standard_normal((length, features)))
        drawn: dict[str, Tensor] = {"noise": torch.from_numpy(np.concatenate(noise))}
        return drawn | {"time": torch.from_numpy(np.concatenate(times))}


FIRST = Draws(0, 0)
"""Those of the first step of a run with the default seed."""
