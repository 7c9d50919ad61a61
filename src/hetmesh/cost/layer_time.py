"""Seconds of a layer from its sizes: FLOPs over what a machine reaches, plus bytes over its memory bandwidth, plus an
overhead per operation. They are summed, not the larger taken: a layer is a row of operations of both kinds.

Attention is timed as the kernels that torch has for it: of a causal one the half that is not hidden, and in the
backward five matrix products for the two of the forward, since the scores are computed again (FlashAttention-2, arXiv
2307.08691, section 3). FLOPs that MFU counts (`flops.py`) keep the convention of two and of all pairs.

Which parts of the backward exist follows Cornstarch (arXiv 2503.11367, section 4), see `flops.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hetmesh.cost.head import targets_of_chunk
from hetmesh.cost.layer_options import ITEMSIZES
from hetmesh.cost.machine import Machine
from hetmesh.cost.recurrence import MOVED, Recurrence
from hetmesh.cost.saved_operations import ATTENTION, operations
from hetmesh.cost.shapes import LayerShape, ModuleShape, WeightShape
from hetmesh.cost.work import Work
from hetmesh.errors import HetmeshError


@dataclass(frozen=True)
class LayerTime:
    """Seconds on each of the ranks that share a layer, without collectives.

    Attributes:
        forward: of one forward.
        backward_input: of what makes the gradient of its input: 0 where nothing before the layer is trainable, but for
            attention, whose factors need gradients for the weights before them in the same layer.
        backward_weight: of what makes the gradients of its parameters; 0 where they are frozen.
        recompute: of running the forward again before the backward; 0 where it is not, or no backward follows.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    recompute: float = 0.0

    @property
    def backward(self) -> float:
        """Of everything after the forward."""
        return self.backward_input + self.backward_weight + self.recompute

    @property
    def at_once(self) -> LayerTime:
        """The same where gradients are made in the forward (`LayerShape.by_chunks`)."""
        return LayerTime(self.forward + self.backward_input + self.backward_weight)


@dataclass(frozen=True)
class Rates:
    """What a rank reaches.

    Attributes:
        flops: FLOP/s in matrix products.
        bandwidth: bytes/s of its memory; 0: unknown, which takes no time.
        overhead: seconds per operation: a product, a norm, a look-up or attention, with what goes with it.
        itemsize: bytes of an element.
    """

    flops: float
    bandwidth: float = 0.0
    overhead: float = 0.0
    itemsize: int = 4

    @classmethod
    def of(cls, machine: Machine, dtype: str, peak: float | None = None) -> Rates:
        """The rates of a machine.

        Args:
            dtype: in which is computed, e.g. `"bfloat16"`.
            peak: FLOP/s that stand in for the machine's own (a CPU's are measured).

        Raises:
            HetmeshError: the machine has no peak for `dtype`, and none is given.
        """
        peak = peak or machine.peak(dtype)
        if not peak:
            raise HetmeshError(
                f"machine {machine.name!r} has no peak_flops.{dtype}; it has {sorted(machine.peak_flops) or 'none'}"
            )
        return cls(machine.efficiency * peak, machine.memory_bandwidth, machine.operation_overhead, ITEMSIZES[dtype])

    def seconds(self, flops: float, elements: float) -> float:
        """Of one operation with `flops` that reads and writes `elements`."""
        moved = elements * self.itemsize / self.bandwidth if self.bandwidth else 0.0
        return self.overhead + flops / self.flops + moved


def layer_time(
    layer: LayerShape,
    work: Work,
    rates: Rates,
    *,
    upstream: bool,
    tp: int = 1,
    recompute: bool = False,
    sequence_parallel: bool = False,
    saved: Collection[str] = (),
) -> LayerTime:
    """Of one layer.

    Args:
        work: of the lane, padding included where it is computed.
        upstream: whether anything trainable comes before the layer: in this module or in one that feeds it.
        tp: tensor parallel ranks that share it. What is not split is computed on each of them.
        recompute: whether its forward runs again before its backward (never that of a head by chunks), but for
        saved: operations whose results are kept (`hetmesh.cost.saved_operations.saved_names`).
        sequence_parallel: whether norms and what else is not split work on a share of the rows each.
    """
    rows = layer.rows(work)
    again = max(rows / targets_of_chunk(layer, rates.itemsize, tp), 1.0)
    products = [(w, _weight_seconds(w, rows, rates, tp, sequence_parallel, again)) for w in layer.weights]
    split = tp if layer.splits_attention else 1
    width = layer.attention_width / split
    pairs = layer.pairs(work) / 2 if layer.causal else layer.pairs(work)
    attention = rates.seconds(4 * width * pairs, 4 * width * rows) if width else 0.0
    states = sum(recurrence_seconds(own, rows, rates, split) for own in layer.recurrences)
    forward = attention + states + sum(seconds for _, seconds in products)
    needed = upstream or layer.trainable
    backward_input = 2 * (attention + states) + 2 * width * pairs / rates.flops if needed else 0.0
    backward_weight = sum(seconds for weight, seconds in products if weight.trainable)
    if upstream:
        backward_input += sum(seconds for _, seconds in products)
    found = LayerTime(forward, backward_input, backward_weight)
    if layer.by_chunks:
        return found.at_once
    if not (recompute and needed):
        return found
    kept = {weight for weight, name, _ in operations(layer, tp) if name in saved}
    repeated = states + sum(seconds for weight, seconds in products if weight not in kept)
    return replace(found, recompute=repeated + attention * (ATTENTION not in saved))


def recurrence_seconds(recurrence: Recurrence, rows: int, rates: Rates, split: int = 1) -> float:
    """Of the states of `rows`, in a forward, where a rank has `1 / split` of the heads."""
    moved = MOVED * recurrence.kept_bytes(rates.itemsize) / rates.itemsize
    return rates.seconds(recurrence.flops * rows / split, moved * rows / split)


def _weight_seconds(
    weight: WeightShape, rows: int, rates: Rates, tp: int, sequence_parallel: bool, chunks: float
) -> float:
    """Of multiplying by one parameter, looking it up or applying it elementwise. A bias goes with its product.
    `chunks`: how often all of it is read."""
    share = 1 / tp if weight.shared else 1.0
    if weight.per_row:
        outputs = weight.outputs * (share if weight.splits_outputs else 1.0)  # the other side is whole on every rank
        inputs = weight.inputs * (share if weight.splits_inputs else 1.0)
        moved = chunks * weight.numel * share + weight.per_row * rows * (outputs + inputs)
        return rates.seconds(2 * weight.multiplied * rows * share, moved)
    if not weight.shape or weight.name.endswith("bias"):
        return 0.0
    return rates.seconds(0, 2 * rows * weight.shape[-1] * (1 / tp if sequence_parallel else share))


def upstream_flags(module: ModuleShape, upstream: bool) -> tuple[bool, ...]:
    """Per layer whether anything trainable comes before it. `upstream`: whether a module that feeds this one, directly
    or not, is trainable."""
    flags = []
    for layer in module.layers:
        flags.append(upstream)
        upstream = upstream or layer.trainable
    return tuple(flags)


def module_times(
    module: ModuleShape, work: Work, rates: Rates, *, upstream: bool, tp: int = 1, recompute: Sequence[str] = ()
) -> dict[str, LayerTime]:
    """Per layer name its seconds; `recompute` names the layers whose forward runs again."""
    return {
        layer.name: layer_time(layer, work, rates, upstream=before, tp=tp, recompute=layer.name in recompute)
        for layer, before in zip(module.layers, upstream_flags(module, upstream), strict=True)
    }
