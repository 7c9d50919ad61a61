"""The encoder as it runs where frameworks know one layout only: whole, on every context parallel rank of a lane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetmesh.models.named.siglip import SiglipAdapter


@dataclass(frozen=True)
class EveryRank(SiglipAdapter):
    """SigLIP of which no linear is split over tensor parallel ranks: each computes all of it."""

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return {}

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {}
