"""Bytes that a layer keeps from forward to backward, from its sizes alone.

What autograd keeps follows from what needs a gradient. A product keeps its input for the gradient of its weight, so
not where the weight is frozen. What lies between products (attention, activation functions, norms) keeps its inputs
whenever anything before or in the layer is trainable; these are about as large as the products' outputs. A frozen
layer with nothing trainable before it keeps nothing (Cornstarch, arXiv 2503.11367).
"""

from __future__ import annotations

import itertools

from hetmesh.cost.shapes import LayerShape, WeightShape
from hetmesh.cost.work import Work


def activation_bytes(
    layer: LayerShape,
    work: Work,
    itemsize: int,
    *,
    upstream: bool,
    tp: int = 1,
    recompute: bool = False,
    sequence_parallel: bool = False,
) -> int:
    """Bytes on each rank that shares the layer, for one microbatch of a lane.

    Args:
        work: of the lane, padding included where it is computed.
        itemsize: bytes of an element of activations.
        upstream: whether anything trainable comes before the layer: in this module or in one that feeds it.
        tp: tensor parallel ranks that share it.
        recompute: whether its forward runs again before its backward: then only its input is kept.
        sequence_parallel: whether what lies between attention and MLP is split over `tp` along the rows. What a
            product reads is gathered before it, and kept whole.
    """
    if not (upstream or layer.trainable):
        return 0
    rows = work.targets if layer.on_targets else work.rows
    products = [weight for weight in layer.weights if weight.per_row]
    between = 1 / tp if sequence_parallel else 1.0
    if recompute and products:
        return round(itemsize * rows * _inputs(products[0]) * between)
    if len(products) > 1:
        kept = sum((1 / tp if w.tp_dim == 0 else between) * w.per_row * w.shape[0] for w in products)
        kept += _gate_elements(products, tp)
        kept += sum(_norm_elements(w, layer, products[0], tp, between) for w in _root_mean_square_norms(layer))
    elif products or not layer.weights or len(layer.weights[0].shape) > 1:
        kept = 0.0
    else:
        kept = layer.weights[0].numel * between  # a norm keeps its input
    kept += layer.attention_width / tp  # the attention's output, which its backward reads
    kept += sum(_input_share(w, tp) * w.per_row * _inputs(w) for w in _distinct(products))
    return round(itemsize * rows * kept)


def _inputs(weight: WeightShape) -> int:
    return weight.numel // weight.shape[0]


def _share(weight: WeightShape, tp: int) -> float:
    """Of its outputs, the part that one rank has."""
    return 1 / tp if weight.tp_dim == 0 else 1.0


def _input_share(weight: WeightShape, tp: int) -> float:
    return 1 / tp if weight.tp_dim == 1 else 1.0


def _gate_elements(products: list[WeightShape], tp: int) -> float:
    """What the product of a gate and its other factor keeps beyond both: the activated gate."""
    pairs = itertools.pairwise(products)
    return sum(_share(a, tp) * a.shape[0] for a, b in pairs if a.shape == b.shape and a.shape[0] > _inputs(a))


def _root_mean_square_norms(layer: LayerShape) -> list[WeightShape]:
    """Elementwise weights without a bias beside them."""
    names = {weight.name for weight in layer.weights}
    return [
        weight
        for weight in layer.weights
        if len(weight.shape) == 1 and weight.name.endswith(".weight") and f"{weight.name[:-6]}bias" not in names
    ]


def _norm_elements(norm: WeightShape, layer: LayerShape, first: WeightShape, tp: int, between: float) -> float:
    """What transformers' RMSNorm keeps beyond its input: the normalised input, for its own weight's gradient. One over
    heads stands between a projection and attention, which then keeps another tensor than the projection gave."""
    if norm.numel == _inputs(first):
        return norm.numel * between if norm.trainable else 0
    return layer.attention_width / tp


def _distinct(products: list[WeightShape]) -> list[WeightShape]:
    """Trainable weights, one of each run that reads the same tensor: queries, keys and values; gate and up."""
    kept: list[WeightShape] = []
    previous: tuple[str, int, int | None] | None = None
    for weight in products:
        parent = weight.name.rpartition(".")[0].rpartition(".")[0]
        reads = parent, _inputs(weight), weight.tp_dim
        if weight.trainable and reads != previous:
            kept.append(weight)
        previous = reads if weight.trainable else None
    return kept
