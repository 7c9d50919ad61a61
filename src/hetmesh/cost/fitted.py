"""Fitted profiles: seconds of each kind of layer as a quadratic of its tokens, fitted to what was measured.

Entrain (arXiv 2605.27918, section 3) fits a x^2 + b x + c to the tokens x of one sequence. A microbatch holds many, so
here the quadratic term is over the (query, key) pairs: seconds = constant + per_row * rows + per_pair * pairs, with no
negative coefficient. The fit minimises relative errors: a small and a large microbatch count alike.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hetmesh.cost.layer_time import LayerTime, upstream_flags
from hetmesh.cost.shapes import LayerShape, ModuleShape
from hetmesh.cost.work import Work
from hetmesh.errors import HetmeshError
from hetmesh.files import from_json, read_file, write_json

PARTS = ("forward", "backward_input", "backward_weight", "backward")
"""What is measured: a forward (or recomputation), and backwards for the input alone, the parameters alone, and both."""
COLLECTIVES = ("collectives_forward", "collectives_backward")
"""Parts of a layer's collectives."""
_MAX_NUMBER = 1e30  # of a number that is read: what is made of it stays finite


@dataclass(frozen=True)
class Coefficients:
    """seconds (or bytes) = constant + per_row * rows + per_pair * pairs."""

    constant: float = 0.0
    per_row: float = 0.0
    per_pair: float = 0.0

    def at(self, rows: int, pairs: int) -> float:
        return self.constant + self.per_row * rows + self.per_pair * pairs


@dataclass(frozen=True)
class Observation:
    """One measurement: the seconds of a part (of `PARTS` or `COLLECTIVES`) of a layer of a kind (`layer_kind`); `rows`
    are targets for a layer that runs on those alone."""

    kind: str
    part: str
    rows: int
    pairs: int
    seconds: float


@dataclass(frozen=True)
class HeldOut:
    """Relative errors of predictions for shapes that were not fitted: mean, largest, and of how many."""

    mean: float = 0.0
    largest: float = 0.0
    count: int = 0


@dataclass(frozen=True)
class Profile:
    """Fitted layers.

    Attributes:
        layers: kind -> part -> coefficients.
        held_out: errors on shapes that were not fitted.
        dtype: in which the layers computed.
        device: on what.
        collectives: kind -> `COLLECTIVES` -> coefficients of collectives inside a layer; missing: by a machine's links.
        collectives_held_out: their errors.
    """

    layers: Mapping[str, Mapping[str, Coefficients]] = field(default_factory=lambda: MappingProxyType({}))
    held_out: HeldOut = HeldOut()
    dtype: str = "float32"
    device: str = "cpu"
    collectives: Mapping[str, Mapping[str, Coefficients]] = field(default_factory=lambda: MappingProxyType({}))
    collectives_held_out: HeldOut = HeldOut()

    def collective_seconds(
        self, kind: str, work: Work, on_targets: bool, *, upstream: bool
    ) -> tuple[float, float] | None:
        """What the collectives of a layer of this kind take in a forward and in its backward, which has none where
        nothing before the layer is trainable; None: not measured."""
        if (parts := self.collectives.get(kind)) is None:
            return None
        rows = work.targets if on_targets else work.rows
        forward, backward = (parts[part].at(rows, work.pairs) if part in parts else 0.0 for part in COLLECTIVES)
        return forward, backward * upstream

    def predict(
        self, layer: LayerShape, work: Work, *, upstream: bool, tp: int = 1, recompute: bool = False
    ) -> LayerTime:
        """The seconds of `layer`; arguments as in `layer_time`.

        A layer measured whole but not at degree `tp` counts with that share of its rows and pairs which is split.
        Raises HetmeshError: no layer of this kind was measured.
        """
        parts, share = self._find(layer, tp)
        rows = work.targets if layer.on_targets else work.rows

        def seconds(fitted: Coefficients) -> float:
            return fitted.constant + share * (fitted.at(rows, work.pairs) - fitted.constant)

        forward, both = seconds(parts["forward"]), parts["backward"]
        recomputed = forward if recompute and (upstream or layer.trainable) else 0.0
        own, weights = 0.0, seconds(parts["backward_weight"])
        if upstream:
            alone = parts["backward_input"]
            if layer.trained_share:  # none above that of both: what is left for weights is linear, and not negative
                alone = Coefficients(*map(min, astuple(alone), astuple(both)))
            own = seconds(alone)
            weights = seconds(both) - own
        found = LayerTime(forward, own, layer.trained_share * weights, recomputed)
        return found.at_once if layer.by_chunks else found

    def layer_seconds(
        self, shape: ModuleShape, work: Work, upstream: bool, tp: int = 1, recompute: bool = False
    ) -> tuple[float, ...]:
        """Of each named layer of a module in forward and backward. Raises HetmeshError: one was not measured."""
        found = []
        for layer, before in zip(shape.layers, upstream_flags(shape, upstream), strict=True):
            if layer.name:
                time = self.predict(layer, work, upstream=before, tp=tp, recompute=recompute)
                found.append(time.forward + time.backward)
        return tuple(found)

    def _find(self, layer: LayerShape, tp: int) -> tuple[Mapping[str, Coefficients], float]:
        for degree in dict.fromkeys((tp, 1)):
            if (kind := layer_kind(layer, degree)) in self.layers:
                return self.layers[kind], 1.0 if degree == tp else _split_share(layer, tp)
        raise HetmeshError(
            f"profile: layer {layer.name!r} is of kind {layer_kind(layer, tp)!r}, which was not measured; it has "
            f"{sorted(self.layers)}"
        )

    def as_json(self) -> dict:
        """What `save` writes."""
        layers, collectives = (
            {kind: {part: asdict(c) for part, c in parts.items()} for kind, parts in table.items()}
            for table in (self.layers, self.collectives)
        )
        out = {"device": self.device, "dtype": self.dtype, "held_out": asdict(self.held_out), "layers": layers}
        if collectives:
            out |= {"collectives": collectives, "collectives_held_out": asdict(self.collectives_held_out)}
        return out

    @property
    def digest(self) -> str:
        """Equal for equal contents: eight hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:8]

    def save(self, path: str | Path) -> None:
        """Write it as JSON. Raises OutputError: it cannot be written."""
        write_json(path, self.as_json(), indent=2)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote. Raises HetmeshError: the file is none."""
        try:
            raw = from_json(read_file(path))
            layers, collectives = (
                {k: {p: Coefficients(**_numbers(c)) for p, c in parts.items()} for k, parts in table.items()}
                for table in (raw["layers"], raw.get("collectives", {}))
            )
            if incomplete := [k for k, parts in layers.items() if set(parts) != set(PARTS)]:
                raise ValueError(f"layer {incomplete[0]!r} needs {', '.join(PARTS)}")
            errors = [HeldOut(**_numbers(raw.get(name, {}))) for name in ("held_out", "collectives_held_out")]
            return cls(layers, errors[0], str(raw["dtype"]), str(raw["device"]), collectives, errors[1])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise HetmeshError(f"profile {path}: not one that `hetmesh profile` wrote: {error}") from error


def _numbers(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table. Raises ValueError where something in it is no number that `fit` may give."""
    for key, value in table.items():
        if type(value) not in (int, float) or not 0 <= value <= _MAX_NUMBER:
            raise ValueError(f"{key} must be a number from 0 to {_MAX_NUMBER:g}, got {value!r}")
    return table


def layer_kind(layer: LayerShape, tp: int = 1, cp: int = 1, sequence_parallel: bool = False) -> str:
    """What layers of equal cost have in common: the sizes of their parameters and attention, and the degrees. What a
    rank computes of its rows is the same under all `cp`, and with sequence parallelism; collectives are not."""
    runs = itertools.groupby("x".join(map(str, weight.shape)) + "*" * weight.per_row for weight in layer.weights)
    sizes = ",".join(f"{shape}:{n}" if n > 1 else shape for shape, n in ((s, len(list(g))) for s, g in runs))
    where = "targets" if layer.on_targets else "rows"
    where += f" of {layer.tokens_per_row} tokens" if layer.tokens_per_row > 1 else ""
    shared = f"; cp {cp}" * (cp > 1) + "; sequence parallel" * (sequence_parallel and tp > 1)
    return f"attention {layer.attention_width}; weights {sizes or 'none'}; on {where}; tp {tp}{shared}"


def _split_share(layer: LayerShape, tp: int) -> float:
    products = [weight for weight in layer.weights if weight.per_row] or list(layer.weights)
    whole = sum(weight.multiplied or weight.numel for weight in products)
    split = sum(weight.multiplied or weight.numel for weight in products if weight.shared)
    return 1 - (1 - 1 / tp) * split / whole if whole else 1.0


def fit(
    observations: Iterable[Observation],
    held_out: Iterable[Observation] = (),
    *,
    dtype: str = "float32",
    device: str = "cpu",
    collectives: tuple[Sequence[Observation], Sequence[Observation]] = ((), ()),
) -> Profile:
    """A profile of `observations`, with its errors on `held_out`. Raises HetmeshError: a layer lacks one of `PARTS`.
    `collectives`: observations of `COLLECTIVES`, and held out."""
    layers, sent = _fitted(observations), _fitted(collectives[0])
    for kind, parts in layers.items():
        if missing := [part for part in PARTS if part not in parts]:
            raise HetmeshError(f"profile: no measurement of {missing} for a layer of kind {kind!r}")
    return Profile(layers, _errors(layers, held_out), dtype, device, sent, _errors(sent, collectives[1]))


def _fitted(observations: Iterable[Observation]) -> dict[str, dict[str, Coefficients]]:
    grouped: dict[str, dict[str, list[Observation]]] = defaultdict(lambda: defaultdict(list))
    for observation in observations:
        grouped[observation.kind][observation.part].append(observation)
    return {kind: {part: _fit(found) for part, found in parts.items()} for kind, parts in grouped.items()}


def _errors(layers: Mapping[str, Mapping[str, Coefficients]], held_out: Iterable[Observation]) -> HeldOut:
    """How far `layers` are from observations that they were not fitted to."""
    errors = [
        abs(layers[o.kind][o.part].at(o.rows, o.pairs) / o.seconds - 1)
        for o in held_out
        if o.part in layers.get(o.kind, ()) and o.seconds > 0
    ]
    return HeldOut(sum(errors) / len(errors), max(errors), len(errors)) if errors else HeldOut()


def _fit(observations: Sequence[Observation]) -> Coefficients:
    """Relative least squares without negative coefficients."""
    kept = [o for o in observations if o.seconds > 0]
    if not kept:
        return Coefficients()
    features = np.array([[1.0, o.rows, o.pairs] for o in kept])
    seconds = np.array([o.seconds for o in kept])
    return Coefficients(*map(float, non_negative_least_squares(features / seconds[:, None], np.ones(len(kept)))))


def non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 `[n]` that minimises |a x - b|, for `a` of few columns: `[m, n]`, `[m]`.

    The minimum is the plain least-squares solution on the columns where it is positive, so the best feasible solution
    over all 2^n sets of columns is exact.
    """
    columns = a.shape[1]
    scale = np.linalg.norm(a, axis=0)
    scaled = a / np.where(scale > 0, scale, 1.0)
    best, least = np.zeros(columns), float(b @ b)
    for count in range(1, columns + 1):
        for chosen in map(list, itertools.combinations(np.flatnonzero(scale > 0).tolist(), count)):
            x, *_ = np.linalg.lstsq(scaled[:, chosen], b, rcond=None)
            residual = float(np.sum((scaled[:, chosen] @ x - b) ** 2))
            if (x >= 0).all() and residual < least * (1 - 1e-12):
                best, least = np.zeros(columns), residual
                best[chosen] = x / scale[chosen]
    return best
