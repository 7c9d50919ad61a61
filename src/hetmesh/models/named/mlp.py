"""The MLP projector: Linear, GELU, Linear on each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import gelu

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import NONE, AdapterDefaults, AdapterRequest
from hetmesh.models.config_keys import check_keys, positive_int
from hetmesh.models.weights.pretrained import prefixes


class Mlp(nn.Module):
    """Rows `[n, in_features]` -> `[n, out_features]`. The names are those of LLaVA's projector in transformers."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int):
        super().__init__()
        self.linear_1 = nn.Linear(in_features, hidden_features)
        self.linear_2 = nn.Linear(hidden_features, out_features)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear_2(gelu(self.linear_1(rows)))


@dataclass(frozen=True)
class MlpAdapter(AdapterDefaults):
    """A row-wise projector between two widths."""

    in_features: int
    hidden_features: int
    out_features: int
    checkpoint_names: ClassVar = prefixes("", "multi_modal_projector.", "model.multi_modal_projector.")
    checkpoint_unused: ClassVar = ()
    abilities: ClassVar = NONE

    @classmethod
    def make(cls, request: AdapterRequest) -> MlpAdapter | None:
        """The adapter of a recipe's module, or None while a neighbour's width is not known yet: `in_features` is the
        producer's, `out_features` the consumers', `hidden_features` the latter unless given."""
        check_keys(request, ("in_features", "hidden_features", "out_features"))
        if len(request.placeholders) != 1 or not request.consumers:
            raise RecipeError(
                f"{request.key}: mlp maps rows to rows, so it needs exactly one boundary into it "
                f"(has {len(request.placeholders)}) and at least one out of it (has {len(request.consumers)})"
            )
        in_features = request.config.get("in_features", request.in_features)
        out_features = request.config.get("out_features", request.out_features)
        if in_features is None or out_features is None:
            return None
        hidden = request.config.get("hidden_features", out_features)
        return cls(
            positive_int(request, "in_features", in_features),
            positive_int(request, "hidden_features", hidden),
            positive_int(request, "out_features", out_features),
        )

    def build(self) -> nn.Module:
        return Mlp(self.in_features, self.hidden_features, self.out_features)

    def layers(self) -> tuple[str, ...]:
        return ("linear_1", "linear_2")

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        return {"linear_1": "colwise", "linear_2": "rowwise"}

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        (rows,) = inputs.values()
        return module(rows)
