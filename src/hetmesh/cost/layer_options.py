"""LayerOptions: how a layer runs, as far as that decides what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ITEMSIZES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8})
"""Bytes of an element by dtype."""


@dataclass(frozen=True)
class LayerOptions:
    """How a layer runs.

    Attributes:
        dtype: it computes in it, e.g. `"bfloat16"`.
        upstream: whether anything trainable comes before it: in its module or in one that feeds that.
        recompute: whether its forward runs again before its backward, so that only its input is kept, and
        saved: what these operations made (`saved_names`).
        group: the ranks of its tensor parallel group; any that have the same links do.
        sequence_parallel: whether these split along the tokens what lies between attention and MLP. What a product
            reads is gathered before it, and kept as shares (`gathered_inputs`).
        autocast: whether parameters are in fp32 and torch.autocast casts what products read: weights, too, are then
            kept in both, per microbatch, and what lies between products stays in fp32.
        compiled: whether torch.compile fuses what lies between products: its backward then computes norms and
            activated gates again from what else is kept.
        context: ranks that share its tokens.
        experts: the ranks that share its experts, and exchange tokens.
    """

    dtype: str
    upstream: bool
    recompute: bool = False
    group: tuple[int, ...] = ()
    sequence_parallel: bool = False
    autocast: bool = False
    experts: tuple[int, ...] = ()
    compiled: bool = False
    saved: frozenset[str] = frozenset()
    context: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations."""
        return ITEMSIZES[self.dtype]

    @property
    def tp(self) -> int:
        """Tensor parallel ranks that share it."""
        return max(len(self.group), 1)
