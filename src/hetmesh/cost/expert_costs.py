"""What mixture-of-experts blocks cost beyond their products: tokens that travel, and what they keep.

Routing is taken to be even, since it is not known before the weights of the router are: every choice is as likely as
any other, and all ranks have as many tokens. `hetmesh.parallel.experts` is what is counted here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetmesh.cost.collective_time import TensorParallelTime, all_to_all
from hetmesh.cost.layer_options import LayerOptions
from hetmesh.cost.machine import Machine
from hetmesh.cost.shapes import LayerShape
from hetmesh.cost.work import Work

_COUNT_BYTES, _CHOICE_BYTES = 8, 2  # bytes of a number of rows, and of a token's choice, as they travel
_INDEX_BYTES = 8


@dataclass(frozen=True)
class ExpertSizes:
    """Of the experts of one layer: how many there are and each token chooses, features of a token, and outputs of the
    gate (`inner`), which are as many as those of what it multiplies."""

    count: int
    chosen: int
    features: int
    inner: int

    @classmethod
    def of(cls, layer: LayerShape) -> ExpertSizes | None:
        """Those of `layer`; None: it has none."""
        if not layer.expert_weights:
            return None
        down = min(layer.expert_weights, key=lambda weight: len(weight.shape))
        return cls(down.shape[0], down.per_row, down.outputs, down.inputs)


def reached_share(count: int, chosen: int, ranks: int) -> float:
    """The share of tokens that go to one of `ranks` ranks: those that chose any of its `count / ranks` experts."""
    each = count // ranks
    return 1 - math.comb(count - each, chosen) / math.comb(count, chosen)


def exchange_time(layer: LayerShape, work: Work, how: LayerOptions, machine: Machine) -> TensorParallelTime:
    """Seconds of the exchange of tokens in one layer between the ranks that share its experts.

    Each token goes once, with its routing weights and its choices, to each other rank that holds one of its experts,
    and one sum comes back from there; before that numbers of rows. In the backward the gradients of both travel.

    Args:
        layer: with all experts.
        work: of one rank.
    """
    sizes, ranks, n, itemsize = ExpertSizes.of(layer), how.experts, len(how.experts), how.itemsize
    if sizes is None or n < 2:
        return TensorParallelTime()
    rows = layer.rows(work) * (n - 1) * reached_share(sizes.count, sizes.chosen, n)
    with_weights = itemsize * (sizes.features + sizes.chosen)
    there = all_to_all(rows * (with_weights + _CHOICE_BYTES * sizes.chosen), ranks, machine)
    numbers = all_to_all(_COUNT_BYTES * (n - 1) * (1 + sizes.count // n), ranks, machine)
    back = all_to_all(rows * itemsize * sizes.features, ranks, machine)
    backward = back if how.upstream or layer.trainable else 0.0
    if how.upstream or any(weight.trainable and not weight.expert for weight in layer.weights):
        backward += all_to_all(rows * with_weights, ranks, machine)
    return TensorParallelTime(numbers + there + back, backward)


def kept_bytes(layer: LayerShape, itemsize: int, tp: int) -> float:
    """Bytes of each row that the experts of a layer keep, whatever is frozen in it; 0 without any.

    Of each choice the token, both outputs of the first product, the activated gate, the other factor of its product
    with that (which is the second product's input), the output with its weight, and three indices; of each token the
    router's probabilities, twice, and the gradient of the load-balancing loss.
    """
    sizes = ExpertSizes.of(layer)
    if sizes is None:
        return 0.0
    of_choice = itemsize * (2 * sizes.features + 4 * sizes.inner / tp + 1) + 3 * _INDEX_BYTES
    return sizes.chosen * of_choice + 2 * max(itemsize, 4) * sizes.count


def passing_elements(layer: LayerShape, tp: int) -> float:
    """Elements of each row that the experts of a layer hold for a moment; 0 without any: of each choice the token, both
    outputs of the first product, the activated gate, and the second product's input, or gradients of as much."""
    sizes = ExpertSizes.of(layer)
    return 0.0 if sizes is None else sizes.chosen * (sizes.features + 4 * sizes.inner / tp)
