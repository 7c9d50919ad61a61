"""What samples cost: nanoseconds of a forward per row and per attended pair, of models of common sizes on H100s."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetmesh.cost import LayerShape, Rates, WeightShape, Work, layer_time, load_machine

TP = 2
DATA_SHEET = {"efficiency": 0.46, "memory_bandwidth": 3.35e12, "operation_overhead": 10e-6, "launch_overhead": 0.0}
"""In place of what machines/h100.toml has been measured to reach since: the laws were fitted beside these prices, whose
ratios count, and a price is a straight line."""


@dataclass(frozen=True)
class Tower:
    """A transformer: its layers, width, that of its feed-forward part, key heads x head size, matrices of that part."""

    layers: int
    width: int
    inner: int
    keys: int
    inner_matrices: int = 2


TOWERS = {
    "vision": Tower(27, 1152, 4304, 1152),  # SigLIP so400m (config of google/siglip-so400m-patch14-384)
    "audio": Tower(32, 1280, 5120, 1280),  # the encoder of openai/whisper-large-v3
    "llm": Tower(28, 3072, 8192, 1024, 3),  # meta-llama/Llama-3.2-3B
}


@dataclass(frozen=True)
class Price:
    """Nanoseconds of a forward through all layers, on each of the ranks that share them."""

    per_row: float
    per_pair: float
    per_microbatch: float

    def work(self, rows: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        """int64 `[samples]`, without what a microbatch costs anyway."""
        return np.rint(self.per_row * rows + self.per_pair * pairs).astype(np.int64)


def price(module: str) -> Price:
    """Of the tower of that name; `vision` for names that are not known."""
    tower = TOWERS.get(module, TOWERS["vision"])
    shapes = [(tower.width, tower.width), (2 * tower.keys, tower.width), (tower.width, tower.width)]
    shapes += [(tower.inner, tower.width)] * (tower.inner_matrices - 1) + [(tower.width, tower.inner)]
    weights = tuple(WeightShape(f"w{i}", shape, per_row=1, tp_dim=0) for i, shape in enumerate(shapes))
    layer = LayerShape("block", weights, attention_width=tower.width, key_width=tower.keys)
    rates = Rates.of(replace(load_machine("h100"), **DATA_SHEET), "bfloat16")

    def seconds(rows: int, pairs: int) -> float:
        return tower.layers * layer_time(layer, Work(rows, pairs), rates, upstream=True, tp=TP).forward

    fixed, many = seconds(0, 0), 1_000_000
    return Price(1e9 * (seconds(many, 0) - fixed) / many, 1e9 * (seconds(0, many) - fixed) / many, 1e9 * fixed)
