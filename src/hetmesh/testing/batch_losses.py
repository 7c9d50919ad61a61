"""Losses of a whole batch in one process, from their formulas: what the oracle of parity compares with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hetmesh.data.drawn import DrawnSample
from hetmesh.graph import LossSpec, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.models import Adapter
from hetmesh.models.draws import Draws
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.named_loss import named_loss


def summed(recipe: Recipe, name: str, kind: str, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a module over all samples of a batch, from its formula."""
    table = recipe.modules[name].loss
    if kind == "cross_entropy":
        return nn.functional.cross_entropy(outputs[""], batch["targets"], reduction="sum")
    targets = outputs.get("target", batch.get("targets"))
    if table is not None and ":" in kind:
        return named_loss("", table)(outputs[""], {**batch, "targets": targets})
    assert targets is not None
    return ((outputs[""] - targets) ** 2).sum() / targets.shape[-1]


def units_of(
    loss: LossSpec, name: str, graph: ModuleGraph, adapters: Mapping[str, Adapter], drawn: Sequence[DrawnSample]
) -> int:
    """What a loss counts of a batch, sample by sample."""
    if loss.unit == "tokens":
        return sum(d.meta.num_targets for d in drawn)
    items = [item for d in drawn for item in d.meta.media if item.name == graph[name].media]
    if loss.unit == "items":
        return len(items)
    frames = loss.unit == "frames"
    return sum(item.shape[0] if frames else adapters[name].item_latents(item.shape) for item in items)


def draws_of(
    seed: int, step: int, spec: ModuleSpec, adapter: Adapter, metas: Sequence[SampleMeta]
) -> dict[str, Tensor]:
    """What a flow loss draws, one sample after another."""
    parts: list[dict[str, Tensor]] = []
    for meta in metas if adapter.abilities.draws else ():
        shapes = [item.shape for item in meta.media if item.name == spec.media]
        rows = sum(map(adapter.item_latents, shapes))
        parts.append(Draws(seed, step).of(spec.name, [meta.id], [len(shapes)], [rows], adapter.abilities.draws))
    dtype, keys = spec.options.parameter_dtype, parts[0] if parts else ()
    return {key: torch.cat([part[key] for part in parts]).to(dtype) for key in keys}
