"""The projector of a model of transformers as a separate module, where it works on each row by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Abilities, AdapterRequest
from hetmesh.models.config_keys import check_keys
from hetmesh.models.split.whole_model import PROJECTOR, PartAdapter, WholeModel, whole_model
from hetmesh.models.weights.build import build_empty
from hetmesh.models.weights.fill_module import materialize


@dataclass(frozen=True, eq=False)
class HfProjectorAdapter(PartAdapter):
    """What a model has between its tower and its LLM; rows in, as many rows out."""

    whole: WholeModel
    in_features: int
    out_features: int
    part: str = PROJECTOR

    @classmethod
    def make(cls, request: AdapterRequest) -> HfProjectorAdapter | None:
        """The adapter of a recipe's module; None until its producer is known."""
        if request.pretrained is None:
            raise RecipeError(f"{request.key}.initial_load_path is missing: {request.model!r} is made from it")
        check_keys(request, ())
        whole = whole_model(request.pretrained)
        _ = whole.owners_apart
        if request.in_features is None:
            return None
        adapter = cls(whole, request.in_features, 0)
        try:
            return cls(whole, request.in_features, adapter.width_if_by_row())
        except RuntimeError as error:
            raise RecipeError(
                f"{request.key}: {whole.projector} of {whole.model_class.__name__} cannot be a module of its own: "
                f"{error}; "
                "leave the table out, and it is part of its tower's module"
            ) from error

    @property
    def abilities(self) -> Abilities:
        return Abilities(stored_forms=self.whole.stored_forms)

    def width_if_by_row(self) -> int:
        """The width of its rows. Raises RuntimeError if it does not take rows alone, or a row depends on others."""
        module = build_empty(self)
        materialize(module, torch.device("cpu"))
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
            rows = torch.randn(4, self.in_features, generator=draw)
            try:
                together, first = self._run(module, rows), self._run(module, rows[:1])
            except Exception as error:  # whatever else it wants than rows
                raise RuntimeError(f"it does not take rows alone ({type(error).__name__})") from error
        if together.ndim != 2 or len(together) != 4 or not torch.allclose(together[:1], first, rtol=1e-4, atol=1e-5):
            raise RuntimeError("what it makes of a row depends on other rows")
        return together.shape[1]

    def _run(self, module: nn.Module, rows: Tensor) -> Tensor:
        return module.get_submodule(self.whole.projector)(rows)

    @property
    def owners(self) -> Mapping[str, str]:
        return self.whole.owners_apart

    def layers(self) -> tuple[str, ...]:
        return (self.whole.projector,)

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        (rows,) = inputs.values()
        if len(rows) == 0:  # concatenated, so that what emitted no rows stays reachable
            return self._run(module, torch.cat([rows, rows.new_zeros(1, rows.shape[1])]))[:0]
        return self._run(module, rows)
