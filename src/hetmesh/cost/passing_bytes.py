"""Bytes that a layer holds for a moment, beyond what it keeps from forward to backward (`activations.py`).

Of a stage the layer counts that holds most, not the sum over layers: what one has in flight is gone when the next one
begins.
"""

from __future__ import annotations

import itertools

from hetmesh.cost.activations import (
    activation_bytes,
    in_shares,
    input_elements,
    logits_of_a_row,
    loss_itemsize,
    output_share,
)
from hetmesh.cost.experts import passing_elements
from hetmesh.cost.memory import tensor_parallel_elements
from hetmesh.cost.shapes import LayerShape, WeightShape, without_adapters
from hetmesh.cost.work import Work


def forward_bytes(
    layer: LayerShape,
    work: Work,
    itemsize: int,
    *,
    upstream: bool,
    tp: int = 1,
    recompute: bool = False,
    autocast: bool = False,
) -> int:
    """The most beyond what is kept while the forward runs. Arguments as of `activation_bytes`.

    Of a layer that keeps what it computes that is next to nothing, but for the head: its logits live until the loss has
    made their probabilities, in half precision beside a copy in fp32.
    """
    if layer.on_targets:
        if in_shares(layer, tp):
            return _raised(layer, work, itemsize, tp)
        raised = loss_itemsize(itemsize) if itemsize < 4 else 0
        return round(work.targets * (itemsize + raised) * logits_of_a_row(layer, tp))
    if not (upstream or layer.trainable):
        return _in_flight(layer, work, itemsize, tp) + _between(layer, work, itemsize, autocast)
    return _in_flight(layer, work, itemsize, tp) if recompute else 0


def backward_bytes(
    layer: LayerShape,
    work: Work,
    itemsize: int,
    *,
    upstream: bool,
    tp: int = 1,
    recompute: bool = False,
    autocast: bool = False,
) -> int:
    """The most beyond what is kept while the backward runs: gradients in flight, that of the largest weight before it
    is added to the sum, and what is computed again. Arguments as of `activation_bytes`."""
    if not (upstream or layer.trainable):
        return 0
    weights = [tensor_parallel_elements(weight, tp) for weight in layer.weights if weight.trainable]
    held = itemsize * max(weights, default=0)
    if layer.on_targets and in_shares(layer, tp):
        own = round(work.targets * itemsize * logits_of_a_row(layer, tp))
        return own + max(held, _raised(layer, work, itemsize, tp))
    if layer.on_targets:  # of the logarithms of probabilities and of the logits
        return held + round(2 * work.targets * loss_itemsize(itemsize) * logits_of_a_row(layer, tp))
    held += _in_flight(layer, work, itemsize, tp)
    if recompute:
        again, kept = (
            activation_bytes(layer, work, itemsize, upstream=upstream, tp=tp, recompute=flag, autocast=autocast)
            for flag in (False, True)
        )
        held += again - kept
    return held


def split_bytes(layer: LayerShape, work: Work, itemsize: int, *, upstream: bool, tp: int = 1) -> int:
    """What is kept from the input's part of a backward to the weights' part, beside all activations: the gradients of
    the outputs of whatever has a trainable weight (`hetmesh.runtime.backward.SplitBackward`)."""
    if not upstream:
        return 0
    rows = layer.rows(work)
    products = _products(layer)
    kept = sum(output_share(w, tp) * w.per_row * w.outputs for w in products if w.trainable)
    heads = itertools.chain((layer.attention_width / tp, layer.key_width / tp), itertools.repeat(0.0))
    for weight in layer.weights:
        if weight.per_row or not weight.trainable or not weight.name.endswith("weight"):
            continue
        over_heads = len(weight.shape) == 1 and products and weight.numel != products[0].inputs
        kept += next(heads) if over_heads else weight.shape[-1]
    return round(itemsize * rows * kept)


def _in_flight(layer: LayerShape, work: Work, itemsize: int, tp: int) -> int:
    """Outputs of the widest products that read one tensor, and the widest input of a product: of an MLP the gate, what
    it multiplies and the product of both, forward as backward; or what experts hold."""
    layer, halves = without_adapters(layer)
    products, widest, inputs = [w for w in _products(layer) if not w.expert], 0.0, 0.0
    for _, group in itertools.groupby(
        products, lambda w: (w.name.rpartition(".")[0].rpartition(".")[0], input_elements(w))
    ):
        widest = max(widest, sum(output_share(w, tp) * w.per_row * w.outputs for w in group))
    # what an adapter adds is there beside what it is added to
    widest += max((output_share(half, tp) * half.outputs for half in halves), default=0.0)
    for weight in products:
        inputs = max(inputs, input_elements(weight) * (1 / tp if weight.splits_inputs else 1.0))
    rows = layer.rows(work)
    return round(itemsize * rows * max(widest + inputs, passing_elements(layer, tp)))


def _between(layer: LayerShape, work: Work, itemsize: int, autocast: bool) -> int:
    """What lies between the products of a layer that keeps nothing: its input, to which its result is added, what a
    norm made of that, and what entered the first layer, which the caller of them all still holds. Autocast leaves these
    in fp32, and casts what a product reads."""
    products = _products(layer)
    if len(products) < 2:
        return 0
    of_element = 3 * max(itemsize, 4) + itemsize if autocast else 3 * itemsize
    return round(of_element * layer.rows(work) * input_elements(products[0]))


def _products(layer: LayerShape) -> list[WeightShape]:
    return [weight for weight in layer.weights if weight.per_row]


def _raised(layer: LayerShape, work: Work, itemsize: int, tp: int) -> int:
    """Exponentials of a rank's share of the logits, in fp32 at least. They are made in parts of 64 MB
    (`hetmesh.parallel.vocabulary.CHUNK`), which is little where logits matter; a part counts as linear in the targets,
    as all bytes of a layer do, with no more than a third of the logits."""
    return round(work.targets * loss_itemsize(itemsize) * logits_of_a_row(layer, tp) / 3)
