"""DeepStack features (arXiv:2406.04334) as arguments of the decoders of transformers that add them to image tokens
behind their first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetmesh.models.causal_lm import CausalLMAdapter
from hetmesh.parallel.stages import PREVIOUS
from hetmesh.parallel.tokens import tokens_of

FEATURE = "deepstack."
"""How the side outputs of the encoder begin; their number is that of the layer."""


def layer_index(output: str, layers: int) -> int | None:
    """The number of the layer behind which a side output is added, of so many; None: there is none."""
    index = output.removeprefix(FEATURE)
    known = output.startswith(FEATURE) and index.isdigit() and int(index) < layers
    return int(index) if known else None


def deepstack_arguments(
    adapter: CausalLMAdapter, model: Any, hidden: Tensor, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What the decoder is also called with, from the side outputs among `inputs`; see
    `CausalLMAdapter.added_features`."""
    features: dict[int, Tensor] = {}
    mask = torch.zeros(hidden.shape[:-1].numel(), dtype=torch.bool, device=hidden.device)
    for source, at in adapter.sources.items():
        own = {k: rows for k, rows in inputs.items() if k != PREVIOUS and k.startswith(f"{source}.{FEATURE}")}
        if not own:
            continue
        positions = tokens_of(model).locate(batch[f"positions.{at}"], batch["input_ids"].numel())
        mask[positions] = True
        for key, rows in own.items():
            adapter.check_rows(key, at, rows, positions, hidden.shape[-1])
            features[int(key.rpartition(".")[2])] = rows
    if not features:
        return {}
    nothing = hidden.new_zeros(1, 1)  # for the layers of other stages
    return {
        "visual_pos_masks": mask.view(hidden.shape[:-1]),
        "deepstack_visual_embeds": [features.get(i, nothing) for i in range(1 + max(features))],
    }
