"""What an action consists of: attention, MLP and the collectives of tensor parallelism, layer by layer.

A weight that is split along its inputs ends in a sum over the ranks that share the layer, so a layer falls into pieces
of computation, each followed by a sum: attention and MLP in a transformer block. In the backward pieces come in the
other order; a layer that is computed again runs its forward first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from hetmesh.cost import LayerShape, Parts, Work
from hetmesh.cost.layer_time import Rates, layer_time
from hetmesh.cost.step_costs import COLLECTIVE, EXCHANGE

MATRICES = {"attention": 4, "mlp": 2}
"""How many there are in each kind of computation."""

_TYPICAL = Work(1 << 12, 1 << 23, 1 << 12)
_RATES = Rates(1.0)


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer, as `hetmesh.simulate.layer_costs.PARTS` has them."""

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    sums_forward: float
    sums_backward: float


@dataclass(frozen=True)
class LayerPiece:
    """Computation up to a sum: its kind, and its share of a layer's computation and of its sums."""

    kind: str
    share: float
    sums: float


@lru_cache(maxsize=256)
def pieces(layer: LayerShape) -> tuple[LayerPiece, ...]:
    """The pieces of a layer, by its sizes alone."""
    runs: list[list] = [[]]
    for weight in layer.weights:
        runs[-1].append(weight)
        if weight.per_row and weight.splits_inputs:
            runs.append([])
    if not runs[-1] and len(runs) > 1:
        runs.pop()
    seconds, widths = [], []
    for i, run in enumerate(runs):
        width, recurrences = (layer.attention_width, layer.recurrences) if i == 0 else (0, ())
        part = LayerShape(
            "", tuple(run), width, layer.on_targets, tokens_per_row=layer.tokens_per_row, recurrences=recurrences
        )
        seconds.append(layer_time(part, _TYPICAL, _RATES, upstream=True).forward)
        widths.append(sum(w.outputs for w in run if w.per_row and w.splits_inputs))
    whole, wide = sum(seconds), sum(widths)
    mixes = layer.attention_width or layer.recurrences
    kinds = ["attention" if mixes and i == 0 else "mlp" for i in range(len(runs))]
    return tuple(
        LayerPiece(kind, s / whole if whole else 1 / len(runs), w / wide if wide else 1 / len(runs))
        for kind, s, w in zip(kinds, seconds, widths, strict=True)
    )


def forward_parts(layer: LayerShape, seconds: float, sums: float) -> Parts:
    """Of one layer's forward, of which the sums take `sums` beside its `seconds`."""
    return _alternating(pieces(layer), seconds, sums)


def backward_parts(layer: LayerShape, seconds: LayerSeconds) -> tuple[Parts, Parts]:
    """Of one layer's backward: what makes its input's gradient, after what is computed again, and its parameters'."""
    order = pieces(layer)[::-1]
    again = seconds.sums_forward if seconds.recompute else 0.0
    front = _alternating(pieces(layer), seconds.recompute, again) if seconds.recompute else ()
    back = _alternating(order, seconds.backward_input, seconds.sums_backward - again)
    return front + back, _alternating(order, seconds.backward_weight, 0.0)


def joined(parts: Iterable[tuple[str, float]]) -> Parts:
    """Parts one after the other; those of one kind that follow each other are one, and empty ones are left out."""
    out: list[tuple[str, float]] = []
    for kind, seconds in parts:
        if seconds <= 0.0:
            continue
        if out and out[-1][0] == kind and kind != COLLECTIVE:
            out[-1] = kind, out[-1][1] + seconds
        else:
            out.append((kind, seconds))
    return tuple(out)


def filled(parts: list[tuple[str, float]], seconds: float, collectives: float) -> Parts:
    """`parts`, with gathers and keys that are waited for in front; computation takes what `collectives` leave of
    `seconds`, which may be longer as the host launches it."""
    sums = sum(part for kind, part in parts if kind == COLLECTIVE)
    longer = (seconds - collectives) / (sum(part for _, part in parts) - sums or 1.0)
    scaled = [(kind, part if kind == COLLECTIVE else longer * part) for kind, part in parts]
    rest = seconds - sum(part for _, part in scaled)
    return joined([(EXCHANGE, rest if rest > 1e-9 * seconds else 0.0), *scaled])


def _alternating(some: Iterable[LayerPiece], seconds: float, sums: float) -> Parts:
    return tuple(
        part for p in some for part in ((p.kind, p.share * seconds), (COLLECTIVE, p.sums * sums)) if part[1] > 0.0
    )
