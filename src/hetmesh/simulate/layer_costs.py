"""Costs of a layer as linear functions of what is computed, made once per kind of layer and kept.

Seconds and bytes of a layer are a constant plus a multiple each of rows, pairs and targets. Two measurements of the
functions in `hetmesh.cost` give the coefficients, so a microbatch costs a product of small matrices.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from hetmesh.cost import (
    LayerOptions,
    LayerShape,
    LayerTime,
    Machine,
    ModuleShape,
    Profile,
    Rates,
    Work,
    activation_bytes,
    layer_time,
)
from hetmesh.cost.activations import backward_bytes, forward_bytes, gathered_inputs, split_bytes
from hetmesh.cost.collective_time import TensorParallelTime, tensor_parallel_time
from hetmesh.cost.expert_costs import exchange_time
from hetmesh.cost.fitted import layer_kind
from hetmesh.cost.shapes import expert_share
from hetmesh.errors import HetmeshError

PARTS = (
    *("forward", "backward_input", "backward_weight", "recompute", "sums_forward", "sums_backward"),
    *("kept", "kept_by_split", "forward_bytes", "backward_bytes", "input_bytes"),
)
"""Columns of coefficients: the seconds of `LayerTime`, of tensor parallelism's sums and the exchange between experts,
and bytes of activations; the last three are of a moment, of which a stage has the largest and not the sum."""

_ROUTED = np.array([[9, 3], [17, 7]])
"""Operations of routing tokens to experts, forward and backward, beyond the router's product; and where experts lie on
several ranks. Of 96 and 72 calls of torch around the products in `ExpertBlock`, or 161 and 106, where a layer makes 7.5
per operation of its (counted by a dispatch mode)."""
_BASE = Work(1 << 10, 1 << 20, 1 << 10)
_STEPS = (Work(1 << 10), Work(0, 1 << 20), Work(0, 0, 1 << 10))


class LayerCosts:
    """The coefficients of layers on one machine. Share one between the models of many layouts. `profile`: its fitted
    seconds take the place of the analytic ones."""

    def __init__(self, machine: Machine, profile: Profile | None = None) -> None:
        self.machine, self.profile = machine, profile
        self._known: dict[tuple[LayerShape, LayerOptions], np.ndarray] = {}

    def of(self, layer: LayerShape, how: LayerOptions) -> np.ndarray:
        """float64 [4, parts]: constant, per row, per pair and per target of each of `PARTS`. Raises HetmeshError: the
        machine has no peak in the dtype, or the profile lacks the layer."""
        experts = how.experts if layer.expert_weights else ()
        how = replace(how, group=self._placed(how.group), experts=self._placed(experts))
        if (layer, how) not in self._known:
            base = self._at(layer, how, _BASE)
            slopes = [
                (self._at(layer, how, _BASE + step) - base) / max(step.rows, step.pairs, step.targets)
                for step in _STEPS
            ]
            constant = base - sum(s * n for s, n in zip(slopes, (_BASE.rows, _BASE.pairs, _BASE.targets), strict=True))
            self._known[layer, how] = np.stack([np.where(np.abs(constant) < 1e-12, 0.0, constant), *slopes])
        return self._known[layer, how]

    def launches(self, layer: LayerShape, how: LayerOptions) -> np.ndarray:
        """Seconds for which the host launches the operations of a forward, of a backward's part for the input with what
        is computed again, and of that for the parameters; float64 `[3]`. A profile's seconds include them, and what
        torch.compile leaves of them is not known."""
        if how.compiled or self.profile is not None:
            return np.zeros(3)
        rates, flags = Rates(math.inf, overhead=1.0), {"upstream": how.upstream, "recompute": how.recompute}
        time = layer_time(layer, _BASE, rates, tp=how.tp, saved=how.saved, **flags)
        ahead, back = _ROUTED[int(len(how.experts) > 1)] * bool(layer.expert_weights)
        inputs = time.backward_input + back + time.recompute + (ahead if how.recompute else 0)
        return self.machine.launch_overhead * np.array([time.forward + ahead, inputs, time.backward_weight])

    def _placed(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """`ranks` by what matters of them: where they lie on nodes."""
        per_node = self.machine.ranks_per_node
        if not per_node:
            return tuple(range(len(ranks)))
        first = ranks[0] // per_node * per_node if ranks else 0
        return tuple(r - first for r in ranks)

    def _at(self, layer: LayerShape, how: LayerOptions, work: Work) -> np.ndarray:
        exchange = exchange_time(layer, work, how, self.machine)
        whole, layer = layer, expert_share(layer, max(len(how.experts), 1))
        time = self._time(layer if self.profile is None else whole, how, work)
        again = () if how.recompute else gathered_inputs(layer, how)
        sums = tensor_parallel_time(layer, work, how, self.machine, again) + exchange
        if (measured := self.measured_collectives(whole, how, work)) is not None:
            sums = TensorParallelTime(*measured) + exchange
        recomputed = sums.forward if how.recompute and (how.upstream or layer.trainable) else 0.0
        each = (activation_bytes, split_bytes, forward_bytes, backward_bytes)
        kept, split, forward, backward = (size(layer, work, how) for size in each)
        read = split - split_bytes(layer, work, replace(how, recompute=False))  # a part of what is computed again
        parts = (time.forward, time.backward_input, time.backward_weight, time.recompute)
        sizes = kept, split, forward, backward, backward - read
        return np.array([*parts, sums.forward, sums.backward + recomputed, *sizes])

    def measured_collectives(
        self, layer: LayerShape, how: LayerOptions, work: Work = _BASE
    ) -> tuple[float, float] | None:
        """What the collectives inside a layer take, forward and backward, those of context parallelism included; None
        where the profile has none."""
        if self.profile is None or not layer.name:
            return None
        kind = layer_kind(layer, how.tp, how.context, how.sequence_parallel)
        return self.profile.collective_seconds(kind, work, layer.on_targets, upstream=how.upstream)

    def _time(self, layer: LayerShape, how: LayerOptions, work: Work) -> LayerTime:
        flags = {"upstream": how.upstream, "recompute": how.recompute}
        if self.profile is not None:
            if not layer.name:  # parameters of no layer are not measured
                return LayerTime()
            time = self.profile.predict(layer, work, tp=how.tp, **flags)
            share = layer_time(layer, _BASE, Rates(1.0), tp=how.tp, saved=how.saved, **flags)  # of FLOPs
            return replace(time, recompute=time.recompute * (share.recompute / share.forward if share.forward else 1))
        if not self.machine.peak(how.dtype):
            raise HetmeshError(f"machine {self.machine.name!r} has no peak_flops.{how.dtype}")
        rates = Rates.of(self.machine, how.dtype)
        flags |= {"sequence_parallel": how.sequence_parallel}
        return layer_time(layer, work, rates, tp=how.tp, saved=how.saved, **flags)


@lru_cache(maxsize=64)
def kinds(shape: ModuleShape) -> tuple[LayerShape, ...]:
    """The layers of a module without what tells equal ones apart: their names."""
    found = []
    for layer in shape.layers:
        prefix = f"{layer.name}."
        weights = tuple(replace(w, name=_renamed(w.name, prefix)) for w in layer.weights)
        found.append(replace(layer, name="layer" if layer.name else "", weights=weights))
    return tuple(found)


def _renamed(name: str, prefix: str) -> str:
    return f"layer.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
