"""What selective activation checkpointing keeps of a layer: outputs of operations whose sizes follow from its weights.

Names are those of torch (`torch.ops`), but for two that torch takes apart before it calls a kernel (as in torchtitan):
`aten.linear` stands for `aten.mm` and `aten.addmm`, `aten.scaled_dot_product_attention` for its fused kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from hetmesh.cost.shapes import LayerShape, WeightShape

ATTENTION = "aten.scaled_dot_product_attention"
LINEAR = ("aten.mm", "aten.addmm")
_NORM = "aten.native_layer_norm"
SAVABLE = ("aten.linear", *LINEAR, "aten.convolution", ATTENTION, _NORM)
"""Operations that a list may hold."""


def saved_names(given: Iterable[str]) -> frozenset[str]:
    """What a list of operations stands for."""
    return frozenset(name for op in given for name in (LINEAR if op == "aten.linear" else (op,)))


def operations(layer: LayerShape, tp: int = 1, between: float = 1.0) -> Iterator[tuple[WeightShape | None, str, float]]:
    """Its weight, name and elements of a row that one of `tp` ranks has, of each operation of a layer that a list may
    name; `between`: the share of the rows of what lies between attention and MLP."""
    names = {weight.name for weight in layer.weights}
    for weight in layer.weights:
        biased = f"{weight.name.removesuffix('weight')}bias" in names
        share = 1 / tp if weight.splits_outputs else 1.0
        if weight.per_row:
            product = "aten.addmm" if biased and not (tp > 1 and weight.splits_inputs) else "aten.mm"
            name = "aten.convolution" if len(weight.shape) > 2 and not weight.expert else product
            yield weight, name, share * weight.per_row * weight.outputs
        elif biased and len(weight.shape) == 1:
            yield weight, _NORM, between * weight.numel
    if layer.attention_width:
        yield None, ATTENTION, layer.attention_width / (tp if layer.splits_attention else 1)


def saved_elements(layer: LayerShape, saved: Collection[str], tp: int, between: float) -> float:
    """Elements of a row that the operations `saved` (`saved_names`) keep."""
    return sum(elements for _, name, elements in operations(layer, tp, between) if name in saved)
