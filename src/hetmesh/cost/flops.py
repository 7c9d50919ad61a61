"""FLOPs of a module for given work: the transformer formula, aware of what is frozen.

A weight matrix costs 2 x its elements per row that it multiplies, attention 4 x its width per (query, key) pair (two
matrix products). Embedding look-ups, norms and activations are left out, as in torchtitan's and PaLM's MFU; unlike
there a head counts only the positions where it runs, and a convolution counts. Of experts each row multiplies as many
as it chooses, whichever they are.

Backward (Cornstarch, arXiv 2503.11367, section 4): forward x (t + g), where t says that the weight is trainable and g
that something before the layer is, so that the gradient of its input is needed. Attention has no weights: if it needs
a backward at all, both factors of both products get a gradient, hence 2 x forward. (Cornstarch counts it like weights.)
"""

from __future__ import annotations

from dataclasses import dataclass

from hetmesh.cost.shapes import LayerShape, ModuleShape
from hetmesh.cost.work import Work


@dataclass(frozen=True)
class Flops:
    """Floating point operations; a multiplication and an addition are two."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)


def layer_flops(layer: LayerShape, work: Work, *, upstream: bool) -> Flops:
    """Of one layer, over all ranks that share it.

    Args:
        work: of the module.
        upstream: whether anything trainable comes before the layer: in this module or in one that feeds it.
    """
    rows = layer.rows(work)
    forward = backward = 0
    for weight in layer.weights:
        once = 2 * weight.multiplied * rows
        forward += once
        backward += once * (weight.trainable + upstream)
    attention = 4 * layer.attention_width * layer.pairs(work)
    return Flops(forward + attention, backward + attention * 2 * (upstream or layer.trainable))


def module_flops(module: ModuleShape, work: Work, *, upstream: bool) -> Flops:
    """Of a whole module, over all its ranks.

    Args:
        upstream: whether a module that feeds it, directly or not, is trainable.
    """
    total = Flops()
    for layer in module.layers:
        total += layer_flops(layer, work, upstream=upstream)
        upstream = upstream or layer.trainable
    return total
