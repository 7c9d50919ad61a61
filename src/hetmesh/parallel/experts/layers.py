"""What a model says of its mixture-of-experts blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

INNER: Mapping[str, int] = MappingProxyType({"gate_up_proj": 2, "down_proj": 2})
"""The dim of each parameter of the experts that tensor parallelism splits."""

WITHIN: Mapping[str, int] = MappingProxyType({"gate_up_proj": 2, "down_proj": 1})
"""The dim that FSDP splits where there are more ranks than experts."""


@dataclass(frozen=True)
class ExpertLayers:
    """The mixture-of-experts blocks of one module.

    A block has a child `gate`, which gives `(logits [n, experts], weights [n, chosen], experts [n, chosen])` for tokens
    `[n, features]`, and a child `experts` with the parameters `gate_up_proj` `[experts, 2, inner, features]` (gate
    first) and `down_proj` `[experts, features, inner]`, and the activation `act_fn`.

    Attributes:
        blocks: their FQNs, in execution order; all of the module, whatever stage holds them.
        count: experts of each block.
        chosen: experts of each token.
        inner: features between an expert's two products.
        balance: the weight of the load-balancing loss; 0 has none.
    """

    blocks: tuple[str, ...]
    count: int
    chosen: int
    inner: int
    features: int
    balance: float = 0.0
