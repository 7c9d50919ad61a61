"""Whether a user's LLM that says so can take its samples in one row: its logits of two samples, padded and packed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hetmesh.attention.context_attention import ContextAttention
from hetmesh.context import causal, packed
from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.build import build_module
from hetmesh.models.packing import pack_tokens
from hetmesh.models.user.adapters import UserSink

LARGEST = 20_000_000
"""Parameters of a module that is tried: a larger one takes more than a second, in every process of a job."""

_TOLERANCE = 1e-9


def check_packing(adapter: UserSink, example: nn.Module, request: AdapterRequest) -> None:
    """Compare the logits, in float64, with random weights.

    Raises:
        RecipeError: they differ, or the forward fails.
    """
    if sum(p.numel() for p in example.parameters()) > LARGEST or request.vocab_size < 2:
        return
    module = build_module(adapter, request.name, 0, torch.float64).eval()
    where = f"{request.key}: {type(example).__name__} declares `packed_attention`"
    batch, inputs, lengths = two_samples(adapter, request.vocab_size)
    kept = ((0, sum(lengths)),)
    together = pack_tokens(batch, lengths, kept)
    state = ContextAttention(packed([causal(length) for length in lengths]), name=f"{request.name} attention")
    try:
        with torch.no_grad():
            apart = adapter.forward(module, batch, inputs)
            one_row = adapter.forward(module, {**together, "attention": state}, inputs)  # type: ignore[dict-item]
    except Exception as error:
        raise RecipeError(
            f"{where}, but its forward of packed samples failed: {type(error).__name__}: {error}"
        ) from error
    difference = float((apart - one_row).abs().max())
    if not difference <= _TOLERANCE * max(float(apart.abs().max()), 1.0):
        raise RecipeError(
            f"{where}, but its logits of two samples in one row differ by {difference:.2g} from those of the same "
            'samples apart: attention must be hetmesh.attention.attend(..., batch), and positions batch["position_ids"]'
        )


def two_samples(adapter: UserSink, vocab_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[int, int]]:
    """Two samples of unequal lengths as `collate_tokens` pads them, a row of each source in each, and targets."""
    places = list(adapter.sources.values())
    short = len(places) + 3
    lengths, width = (short, short + 1), short + 1
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocab_size, (2, width), generator=generator)
    predicting = torch.tensor([short - 3, short - 2, width + short - 2, width + short - 1])
    batch = {
        "input_ids": ids,
        "position_ids": torch.arange(width).repeat(2, 1),
        "target_positions": predicting,
        "targets": ids.flatten()[predicting + 1],
    }
    batch |= {f"positions.{at}": torch.tensor([i, width + i]) for i, at in enumerate(places)}
    features = adapter.in_features or 1
    rows = {source: torch.randn(2, features, generator=generator, dtype=torch.float64) for source in adapter.sources}
    return batch, rows, lengths
