"""DeepStack features (arXiv:2406.04334) as arguments of the decoders of transformers that add them to image tokens
behind their first layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hetmesh.models.named.causal_lm import CausalLMAdapter
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
    features: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for source, at in adapter.sources.items():
        own = {k: rows for k, rows in inputs.items() if k != PREVIOUS and k.startswith(f"{source}.{FEATURE}")}
        if not own:
            continue
        positions = tokens_of(model).locate(batch, f"positions.{at}")
        for key, rows in own.items():
            adapter.check_rows(key, at, rows, positions, hidden.shape[-1])
            features.setdefault(int(key.rpartition(".")[2]), []).append((positions, rows))
    if not features:
        return {}
    adapter.decoder_of(model)._deepstack_process = _added
    return {"deepstack_visual_embeds": [features.get(i, ()) for i in range(1 + max(features))]}


def _added(hidden: Tensor, mask: None, features: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """In place of the decoders' own method, whose mask as an index has the host wait for the device to know how many
    tokens it has.

    Args:
        features: positions among the flat tokens of `hidden`, and the rows to add there; none for the layers of other
            stages.
    """
    flat = hidden.flatten(0, 1)
    for positions, rows in features:
        flat = flat.index_add(0, positions, rows.to(flat.dtype))
    return flat.view(hidden.shape)
