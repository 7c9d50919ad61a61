"""DeepStack features (arXiv:2406.04334) as arguments of decoders, whose first layers they are added after."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.parallel.stage_views import PREVIOUS
from hetmesh.parallel.tokens import tokens_of

FEATURE = "deepstack."
"""Prefix of the names of the encoder's side outputs; the number after it is that of the decoder layer."""

DEEPSTACK = frozenset({"deepstack_visual_embeds", "deepstack_features"})
"""Of these arguments a decoder has one that takes them: the latter before its layers (Granite 4 Vision)."""


def layer_index(output: str, layers: int) -> int | None:
    """The number of the layer after which a side output is added; None if it is not one of `layers` layers."""
    index = output.removeprefix(FEATURE)
    known = output.startswith(FEATURE) and index.isdigit() and int(index) < layers
    return int(index) if known else None


def deepstack_arguments(
    adapter: CausalLMAdapter, model: Any, hidden: Tensor, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Further arguments of the decoder, from the side outputs among `inputs`; see `CausalLMAdapter.added_features`."""
    features: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for source, at in adapter.sources.items():
        outputs = {k: rows for k, rows in inputs.items() if k != PREVIOUS and k.startswith(f"{source}.{FEATURE}")}
        if not outputs:
            continue
        positions = tokens_of(model).locate(batch, f"positions.{at}")
        for key, rows in outputs.items():
            features.setdefault(int(key.rpartition(".")[2]), []).append((positions, rows))
    if not features:
        return {}
    if "deepstack_features" in inspect.signature(adapter.decoder_of(model).forward).parameters:
        (positions, _), *_ = features[min(features)]
        mask = torch.zeros(hidden.shape[:2].numel(), dtype=torch.bool, device=hidden.device)
        mask[positions] = True
        added = {layer: torch.cat([rows for _, rows in each]) for layer, each in features.items()}
        return {"vision_mask": mask.view(*hidden.shape[:2], 1), "deepstack_features": added}
    adapter.decoder_of(model)._deepstack_process = _added
    return {"deepstack_visual_embeds": [features.get(i, ()) for i in range(1 + max(features))]}


def _added(hidden: Tensor, mask: None, features: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Replaces the decoder's own method, whose boolean mask makes the host wait for a count of tokens. `features`:
    positions among the flat tokens of `hidden`, and the rows to add there; empty for layers of other stages."""
    flat = hidden.flatten(0, 1)
    for positions, rows in features:
        flat = flat.index_add(0, positions, rows.to(flat.dtype))
    return flat.view(hidden.shape)
