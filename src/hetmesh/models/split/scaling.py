"""What a decoder does to embedded tokens before its first layer.

A pipeline stage gets what the stage before returns and calls the same decoder, which would do it again. Where it is a
multiplication (Granite, Gemma), a later stage can be given its input divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hetmesh.models.weights.build import build_empty
from hetmesh.parallel.stages import PassThrough

if TYPE_CHECKING:
    from hetmesh.models.split.llm_half import HfLlmAdapter


def embedding_scale(adapter: HfLlmAdapter) -> float | None:
    """By what the decoder multiplies embedded tokens before its first layer; 1.0 if it leaves them as they are, None if
    it does something else. Measured: its layers and norm hand on what they get."""
    module = build_empty(adapter)
    for name in adapter.layers():
        if name != adapter.whole.embedding:
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, PassThrough())
    decoder: Any = adapter.decoder_of(module)
    tokens = torch.linspace(-1.0, 1.0, 2 * adapter.config.hidden_size).view(1, 2, -1).double()
    axes = (3,) if adapter.whole.positions == "rope_index" else ()
    positions = torch.arange(2).expand(*axes, 1, 2)
    try:
        with torch.no_grad():
            given = decoder.double()(inputs_embeds=tokens, position_ids=positions, use_cache=False).last_hidden_state
    except Exception:  # parameters without memory beside layers and norm, and whatever else
        return None
    scale = float((given * tokens).sum() / (tokens * tokens).sum())
    close = torch.allclose(given, scale * tokens, rtol=1e-6, atol=1e-9)  # constants may be rounded to fp32
    return (1.0 if abs(scale - 1) < 1e-12 else scale) if close and scale else None
