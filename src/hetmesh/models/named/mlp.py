"""The MLP: Linear, GELU, Linear on each row. A projector between two modules, or a regression head behind the LLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import NONE, AdapterDefaults, AdapterRequest, SampleLike
from hetmesh.models.collate import media_items
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
    """A row-wise projector between two widths; the second, `width`, is that of its rows if it has consumers."""

    in_features: int
    hidden_features: int
    out_features: int | None
    width: int
    checkpoint_names: ClassVar = prefixes("", "multi_modal_projector.", "model.multi_modal_projector.")
    checkpoint_unused: ClassVar = ()
    abilities: ClassVar = NONE

    @classmethod
    def make(cls, request: AdapterRequest) -> MlpAdapter | None:
        """The adapter of a recipe's module, or None while a neighbour's width is not known yet: `in_features` is the
        producer's, `out_features` the consumers', `hidden_features` the latter unless given. A regression head, which
        has no consumers, needs `out_features`."""
        check_keys(request, ("in_features", "hidden_features", "out_features"))
        if len(request.placeholders) != 1 or not (request.consumers or request.generates):
            raise RecipeError(
                f"{request.key}: mlp maps rows to rows, so it needs exactly one boundary into it "
                f"(has {len(request.placeholders)}) and at least one out of it (has {len(request.consumers)}), or none "
                "as a regression head after the LLM"
            )
        in_features = request.config.get("in_features", request.in_features)
        out_features = request.config.get("out_features", request.out_features)
        if request.generates and out_features is None:
            raise RecipeError(f"{request.key}.config.out_features: missing; how wide are the values to predict?")
        if in_features is None or out_features is None:
            return None
        hidden = request.config.get("hidden_features", out_features)
        inner = positive_int(request, "in_features", in_features), positive_int(request, "hidden_features", hidden)
        width = positive_int(request, "out_features", out_features)
        if request.generates:
            return RegressionHead(*inner, None, width, request.name, request.media or "")
        return cls(*inner, width, width)

    def build(self) -> nn.Module:
        return Mlp(self.in_features, self.hidden_features, self.width)

    def layers(self) -> tuple[str, ...]:
        return ("linear_1", "linear_2")

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        return {"linear_1": "colwise", "linear_2": "rowwise"}

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        (rows,) = inputs.values()
        return module(rows)


@dataclass(frozen=True)
class RegressionHead(MlpAdapter):
    """Predicts a row of values per token: items are tensors `[..., width]`, with a token for each of their rows."""

    name: str
    media: str

    def item_rows(self, shape: tuple[int, ...]) -> int:
        if not shape or shape[-1] != self.width:
            raise SampleError(
                f"module {self.name!r} predicts {self.width} values per token (modules.{self.name}.config."
                f"out_features), but a {self.media!r} has shape {tuple(shape)}, whose last dim must be that"
            )
        return math.prod(shape[:-1])

    def item_latents(self, shape: tuple[int, ...]) -> int:
        return self.item_rows(shape)

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **_: Any) -> dict[str, Tensor]:
        """`targets`: `[rows of all items, width]`."""
        items = media_items(samples, metas, self.media)
        return {"targets": torch.cat([torch.zeros(0, self.width), *(item.reshape(-1, self.width) for item in items)])}
