"""Bytes that a layer keeps from forward to backward, from its sizes alone.

What autograd keeps follows from what needs a gradient. A product keeps its input for the gradient of its weight, so
not where the weight is frozen. What lies between products (attention, activation functions, norms) keeps its inputs
whenever anything before or in the layer is trainable; these are about as large as the products' outputs. A frozen
layer with nothing trainable before it keeps nothing (Cornstarch, arXiv 2503.11367).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hetmesh.cost.expert_costs import kept_bytes, passing_elements
from hetmesh.cost.head import chunk_itemsize, in_shares, logits_of_a_row, loss_itemsize
from hetmesh.cost.layer_options import LayerOptions
from hetmesh.cost.saved_operations import saved_elements
from hetmesh.cost.shapes import LayerShape, WeightShape, without_adapters
from hetmesh.cost.static_memory import tensor_parallel_elements
from hetmesh.cost.work import Work


def activation_bytes(layer: LayerShape, work: Work, how: LayerOptions) -> int:
    """Bytes on each rank that shares the layer, for one microbatch of a lane. Of the head of an LLM also what the loss
    keeps: the logarithms of its probabilities, in fp32 at least; of shares of the vocabulary the logits as they are; by
    chunks instead of all that the gradients of its input and its weights.
    `work`: of the lane, padding included where it is computed.
    """
    if not (how.upstream or layer.trainable):
        return 0
    itemsize, tp, rows = how.itemsize, how.tp, layer.rows(work)
    products = _products(layer)
    if layer.by_chunks:
        own = sum(tensor_parallel_elements(weight, tp) for weight in layer.weights if weight.trainable)
        inputs = products[0].inputs if products and how.upstream else 0
        return round(itemsize * rows * inputs + (max(itemsize, 4) if how.autocast else itemsize) * own)
    shares = sum(gathered_inputs(layer, how))
    between = 1 / tp if how.sequence_parallel else 1.0
    if how.recompute and len(products) > 1:
        own = max(itemsize, 4) if how.autocast else itemsize  # it lies between products
        kept = itemsize * saved_elements(layer, how.saved, tp, between)
        return round(rows * (own * products[0].inputs * between + kept))
    casts = sum(tensor_parallel_elements(weight, tp) for weight in products) if how.autocast else 0
    layer, halves = without_adapters(layer)
    products = [weight for weight in _products(layer) if not weight.expert]
    kept = sum(_input_share(w, tp) * w.per_row * w.inputs for w in _distinct(products) if not _is_convolution(layer, w))
    kept += sum(half.inputs for half in halves if half.trainable) - (1 - 1 / tp) * shares
    if layer.on_targets:
        logits = 0 if not products else itemsize if in_shares(layer, tp) else loss_itemsize(itemsize)
        return round(itemsize * (rows * kept + casts) + logits * rows * logits_of_a_row(layer, tp))
    first = [w for w in products if _part(w) == _part(products[0])]  # of the attention, if there is one
    of_attention = () if layer.splits_attention else first[:-1]  # which makes all rows on every rank
    for w in (w for w in products if not _is_convolution(layer, w)):
        kept += (1 / tp if w.splits_outputs else 1.0 if w in of_attention else between) * w.per_row * w.outputs
    if len(products) > 1:
        kept += (0 if how.compiled else _gate_elements(products, tp)) + _attention_elements(layer, products, tp)
        kept += sum(_norm_elements(layer, products[0], tp, itemsize, between, how.compiled))
        kept += between * layer.row_copies * products[0].inputs
    elif not products and layer.weights:
        # the rows of a table; or what a norm makes of its input, for the gradient of its weight
        kept += between * layer.weights[0].shape[-1] * (1 + _raised(itemsize) * (len(layer.weights[0].shape) == 1))
    if how.autocast:
        kept += between * sum(w.shape[-1] for w in layer.weights if _is_between(w, products))
    if tp > 1:  # rows that are joined to one weight
        casts += sum(w.numel // tp for w in layer.weights if w.own_rows)
    besides = kept_bytes(layer, itemsize, tp) + _recurrent_bytes(layer, itemsize, tp)
    return round(itemsize * (rows * kept + casts) + rows * besides)


def _recurrent_bytes(layer: LayerShape, itemsize: int, tp: int) -> float:
    """Of a row, what recurrences keep, and hold in a forward that keeps nothing."""
    return sum(own.kept_bytes(itemsize) for own in layer.recurrences) / (tp if layer.splits_attention else 1)


def gathered_inputs(layer: LayerShape, how: LayerOptions) -> list[int]:
    """Widths of the rows that sequence parallelism gathers for a block's products and again in the backward, for the
    gradients of their weights (`hetmesh.parallel.sequence_parallel`). None where autocast makes a copy of them, which
    is kept, or low-rank adapters read them."""
    if not how.sequence_parallel or how.autocast or layer.on_targets:
        return []
    if len(_products(layer)) < 2 or without_adapters(layer)[1]:
        return []
    return [w.inputs for w in _distinct(_products(layer)) if w.splits_outputs and not w.expert]


def _is_between(weight: WeightShape, products: list[WeightShape]) -> bool:
    """Whether it is a table or a norm of whole rows."""
    if weight.per_row or not weight.name.endswith("weight"):
        return False
    return not products or weight.numel == products[0].inputs


def _raised(itemsize: int) -> int:
    """1 where a root mean square norm computes in fp32 and keeps its input in twice the bytes."""
    return int(itemsize < 4)


def output_share(weight: WeightShape, tp: int) -> float:
    """Of a product's outputs, the part that one rank has."""
    return 1 / tp if weight.splits_outputs else 1.0


def _input_share(weight: WeightShape, tp: int) -> float:
    return 1 / tp if weight.splits_inputs else 1.0


def _gate_elements(products: list[WeightShape], tp: int) -> float:
    """What the product of a gate and its other factor keeps beyond both: the activated gate."""
    pairs = itertools.pairwise(products)
    return sum(output_share(a, tp) * a.shape[0] for a, b in pairs if a.shape == b.shape and a.shape[0] > a.inputs)


def _root_mean_square_norms(layer: LayerShape) -> list[WeightShape]:
    """Elementwise weights without a bias beside them."""
    names = {weight.name for weight in layer.weights}
    return [
        weight
        for weight in layer.weights
        if len(weight.shape) == 1 and weight.name.endswith(".weight") and f"{weight.name[:-6]}bias" not in names
    ]


def _norm_elements(
    layer: LayerShape, first: WeightShape, tp: int, itemsize: int, between: float, compiled: bool
) -> Iterator[float]:
    """What transformers' RMSNorms keep beyond the output of the product before them: the normalised input, for their
    own weight's gradient. Those over heads, first of queries, then of keys, stand between a projection and attention,
    which then keeps another tensor than the projection gave, as wide."""
    of_heads = iter((layer.attention_width / tp, layer.keys_on(tp) or layer.attention_width / tp))
    for norm in _root_mean_square_norms(layer):
        if norm.numel == first.inputs:
            yield 0 if compiled else norm.numel * (norm.trainable + _raised(itemsize)) * between
        else:
            own = next(of_heads, layer.attention_width / tp)
            yield own if compiled else own * (norm.trainable + _raised(itemsize) + 1)


def _attention_elements(layer: LayerShape, products: list[WeightShape], tp: int) -> float:
    """Attention's output, which its backward reads, unless the product after it keeps it anyway; and what of a head of
    keys and values that ranks share the others have made. A kernel reads each of these heads for several of queries:
    transformers makes no copies where there is no mask (`transformers.integrations.sdpa_attention`)."""
    width, groups = layer.attention_width, _distinct(products)
    if not width:
        return 0.0
    split = tp if layer.splits_attention else 1
    output = 0 if any(w.inputs == width and w is not products[0] for w in groups) else width
    others = 2 * (layer.keys_on(split) - layer.key_width / split)
    return (output + layer.attention_copies * width) / split + others


def _is_convolution(layer: LayerShape, weight: WeightShape) -> bool:
    """Whether it is that of a recurrence, which counts what it keeps (`Recurrence.kept_bytes`)."""
    return bool(layer.recurrences) and len(weight.shape) == 3 and not weight.expert


def _part(weight: WeightShape) -> str:
    return weight.name.rpartition(".")[0].rpartition(".")[0]


def _distinct(products: list[WeightShape]) -> list[WeightShape]:
    """Trainable weights, one of each run that reads the same tensor: queries, keys and values; gate and up."""
    kept: list[WeightShape] = []
    previous: tuple[str, int, bool] | None = None
    for weight in products:
        reads = _part(weight), weight.inputs, weight.splits_inputs
        if weight.trainable and reads != previous:
            kept.append(weight)
        previous = reads if weight.trainable else None
    return kept


def forward_bytes(layer: LayerShape, work: Work, how: LayerOptions) -> int:
    """The most beyond what is kept while the forward runs; of a head by chunks as if all were one (`most_targets`).

    Of a layer that keeps what it computes that is next to nothing, but for the head: its logits live until the loss has
    made their probabilities, in half precision beside a copy in fp32.
    """
    if layer.by_chunks:
        return round(work.targets * chunk_itemsize(layer, how) * logits_of_a_row(layer, how.tp))
    if layer.on_targets:
        if in_shares(layer, how.tp):
            return _exponential_bytes(layer, work, how)
        raised = loss_itemsize(how.itemsize) if how.itemsize < 4 else 0
        return round(work.targets * (how.itemsize + raised) * logits_of_a_row(layer, how.tp))
    recurrent = round(layer.rows(work) * _recurrent_bytes(layer, how.itemsize, how.tp))
    in_flight = max(_in_flight(layer, work, how), recurrent)
    if not (how.upstream or layer.trainable):
        return in_flight + _between(layer, work, how)
    return in_flight if how.recompute else 0


def backward_bytes(layer: LayerShape, work: Work, how: LayerOptions) -> int:
    """The most beyond what is kept while the backward runs: gradients in flight, that of the largest weight before it
    is added to the sum, what is gathered again, and what is computed again."""
    if layer.by_chunks or not (how.upstream or layer.trainable):
        return 0
    itemsize, tp = how.itemsize, how.tp
    weights = [tensor_parallel_elements(weight, tp) for weight in layer.weights if weight.trainable]
    held = itemsize * max(weights, default=0)
    if layer.on_targets and in_shares(layer, tp):
        own = round(work.targets * itemsize * logits_of_a_row(layer, tp))
        return own + max(held, _exponential_bytes(layer, work, how))
    if layer.on_targets:  # of the logarithms of probabilities and of the logits
        return held + round(2 * work.targets * loss_itemsize(itemsize) * logits_of_a_row(layer, tp))
    held += _in_flight(layer, work, how)
    gathered = gathered_inputs(layer, how)
    if how.recompute:
        again, kept = (activation_bytes(layer, work, replace(how, recompute=flag)) for flag in (False, True))
        # autograd keeps what was gathered until the backward of the block, which follows
        again += round(itemsize * layer.rows(work) * (1 - 1 / tp) * sum(gathered))
        return held + max(again - kept, 0)
    return held + itemsize * layer.rows(work) * max(gathered, default=0)


def split_bytes(layer: LayerShape, work: Work, how: LayerOptions) -> int:
    """What is kept from the input's part of a backward to the weights' part, beside all activations: the gradients of
    the outputs of whatever has a trainable weight (`hetmesh.runtime.backward.SplitBackward`), where its forward runs
    again what goes into it, weights that autocast has cast included, and what was gathered again."""
    if not how.upstream or layer.by_chunks:
        return 0
    itemsize, tp, rows = how.itemsize, how.tp, layer.rows(work)
    products = _products(layer)
    kept = sum(output_share(w, tp) * w.per_row * w.outputs for w in products if w.trainable)
    again = how.recompute and len(products) > 1
    casts = sum(tensor_parallel_elements(w, tp) for w in products if w.trainable) if how.autocast and again else 0
    kept += sum(_input_share(w, tp) * w.per_row * w.inputs for w in _distinct(products)) if again else 0
    raised = max(itemsize, 4) / itemsize if how.autocast else 1
    kept += sum(gathered_inputs(layer, how))
    heads = itertools.chain((layer.attention_width / tp, layer.keys_on(tp)), itertools.repeat(0.0))
    for weight in layer.weights:
        if weight.per_row or not weight.trainable or not weight.name.endswith("weight"):
            continue
        over_heads = len(weight.shape) == 1 and products and weight.numel != products[0].inputs
        kept += raised * (1 + again) * (next(heads) if over_heads else weight.shape[-1])
    return round(itemsize * (rows * kept + casts))


def _in_flight(layer: LayerShape, work: Work, how: LayerOptions) -> int:
    """Outputs of the widest products that read one tensor, and the widest input of a product: of an MLP the gate, what
    it multiplies and the product of both, forward as backward; or what experts hold."""
    layer, halves = without_adapters(layer)
    products, widest, inputs = [w for w in _products(layer) if not w.expert], 0.0, 0.0
    for _, group in itertools.groupby(products, lambda w: (_part(w), w.inputs, w.splits_inputs)):
        widest = max(widest, sum(output_share(w, how.tp) * w.per_row * w.outputs for w in group))
    # what an adapter adds is there beside what it is added to
    widest += max((output_share(half, how.tp) * half.outputs for half in halves), default=0.0)
    for weight in products:
        inputs = max(inputs, weight.inputs * _input_share(weight, how.tp))
    return round(how.itemsize * layer.rows(work) * max(widest + inputs, passing_elements(layer, how.tp)))


def _between(layer: LayerShape, work: Work, how: LayerOptions) -> int:
    """What lies between the products of a layer that keeps nothing: its input, to which its result is added, what a
    norm made of that, and what entered the first layer, which the caller of them all still holds. Autocast leaves these
    in fp32, and casts what a product reads."""
    products = _products(layer)
    if len(products) < 2:
        return 0
    of_element = 3 * max(how.itemsize, 4) + how.itemsize if how.autocast else 3 * how.itemsize
    return round(of_element * layer.rows(work) * products[0].inputs)


def _products(layer: LayerShape) -> list[WeightShape]:
    return [weight for weight in layer.weights if weight.per_row]


def _exponential_bytes(layer: LayerShape, work: Work, how: LayerOptions) -> int:
    """Exponentials of a rank's share of the logits, in fp32 at least. They are made in parts of 64 MB
    (`hetmesh.parallel.vocabulary.CHUNK`), which is little where logits matter; a part counts as linear in the targets,
    as all bytes of a layer do, with no more than a third of the logits."""
    return round(work.targets * loss_itemsize(how.itemsize) * logits_of_a_row(layer, how.tp) / 3)
