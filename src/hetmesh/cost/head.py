"""The logits that the head of an LLM makes, and how many at a time."""

from __future__ import annotations

import math

from hetmesh.cost.layer_options import LayerOptions
from hetmesh.cost.shapes import LayerShape, without_adapters

CHUNK_BYTES = 1 << 28
"""Of the logits of a chunk of targets and their gradient, 256 MiB (`hetmesh.parallel.linear_cross_entropy`). Each chunk
reads the weight and adds to its gradient: of a share of 124,160 tokens in bf16 a chunk has 1081 targets, for which the
products take several times as long as that."""

_RAISED_BYTES = 1 << 26  # of what is made of them in fp32 at a time (`hetmesh.parallel.vocabulary.CHUNK`)


def in_shares(layer: LayerShape, tp: int) -> bool:
    """Whether ranks have shares of the logits that a head makes; the loss then keeps these as they are."""
    return tp > 1 and layer.shares_logits and any(w.per_row and w.tp_dim == 0 for w in layer.weights)


def logits_of_a_row(layer: LayerShape, tp: int) -> float:
    """Logits of one target that one rank has."""
    widest = max((w.shape[0] for w in layer.weights if w.per_row), default=0)
    return widest / tp if in_shares(layer, tp) else widest


def targets_of_chunk(layer: LayerShape, itemsize: int, tp: int) -> float:
    """Targets whose logits such a head makes at a time; without a head by chunks: all."""
    width = logits_of_a_row(layer, tp) if layer.by_chunks else 0
    return CHUNK_BYTES / (itemsize * _copies(layer) * width) if width else math.inf


def most_targets(layer: LayerShape, how: LayerOptions) -> float:
    """Of how many targets there is ever more than what a layer keeps (`forward_bytes`, `backward_bytes`)."""
    width = logits_of_a_row(layer, how.tp) if layer.by_chunks else 0
    return (CHUNK_BYTES + _RAISED_BYTES) / (chunk_itemsize(layer, how) * width) if width else math.inf


def _copies(layer: LayerShape) -> int:
    """Logits, and their gradient where that cannot take their place: autograd goes through adapters."""
    return 2 if without_adapters(layer)[1] else 1


def chunk_itemsize(layer: LayerShape, how: LayerOptions) -> int:
    """Bytes for each logit of a chunk, with what is made of it in fp32: its exponential; of whole vocabularies the
    logarithm of its probability, and its gradient by that and by the logit."""
    return _copies(layer) * how.itemsize + (1 if in_shares(layer, how.tp) else 3) * loss_itemsize(how.itemsize)


def loss_itemsize(itemsize: int) -> int:
    """Bytes of an element of logits in the loss, which raises half precision."""
    return max(itemsize, 4)
