"""Whether what a user's module makes of a sample depends on those beside it: called with two, and with each alone.

Lanes and microbatches hold other samples together in every layout, so a mean over the batch, or attention that sees
padding, would train something else in each of them. Layers that are known to do so are refused by their class
(`models/batch_statistics.py`); this finds the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Adapter, AdapterRequest
from hetmesh.models.build import build_module
from hetmesh.models.own.adapters import OwnAdapter, OwnEncoder, OwnItemsEncoder, OwnSink
from hetmesh.models.own.packing_probe import LARGEST, two_samples

_TOLERANCE = 1e-9

Call = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Of `adapter.forward`: a batch, and rows by source."""


def check_apart(adapter: OwnAdapter, example: nn.Module, request: AdapterRequest) -> None:
    """Compare both, in float64, with random weights and without dropout.

    Not tried: modules of more than `LARGEST` parameters, those that are random without dropout too, and those that
    cannot read random numbers (an encoder of ids, say).

    Raises:
        RecipeError: they differ.
    """
    if sum(p.numel() for p in example.parameters()) > LARGEST:
        return
    if isinstance(adapter, OwnSink) and request.vocab_size < 2:
        return
    module = build_module(adapter, request.name, 0, torch.float64).eval()
    together, apart = calls_of(adapter, request.vocab_size)
    try:
        with torch.no_grad():
            of_both, again = adapter.forward(module, *together), adapter.forward(module, *together)
            of_each = torch.cat([adapter.forward(module, *call) for call in apart])
    except Exception:  # training says what is wrong with it, of what it really gets
        return
    if not torch.equal(of_both, again):
        return
    difference = float((of_both - of_each).abs().max())
    if not difference <= _TOLERANCE * max(float(of_both.abs().max()), 1.0):
        what = "logits of a sample" if isinstance(adapter, OwnSink) else "rows of an item"
        beside = "a longer one, or padding" if isinstance(adapter, OwnSink) else "another"
        raise RecipeError(
            f"{request.key}: what {type(example).__name__} computes is no matter of each sample alone: the {what} "
            f"differ by {difference:.2g} where {beside} is computed beside it. Lanes and microbatches hold other "
            "samples together in every layout, so each would train something else: does it take a mean or a maximum "
            "over the batch, or attend to padding?"
        )


def two_of_its_inputs(adapter: Adapter, vocab_size: int) -> Call | None:
    """Two samples for a module that is called as users' own are; None for others."""
    if isinstance(adapter, OwnSink) and vocab_size < 2:
        return None
    return calls_of(adapter, vocab_size)[0] if isinstance(adapter, OwnAdapter) else None


def calls_of(adapter: OwnAdapter, vocab_size: int) -> tuple[Call, Sequence[Call]]:
    """A call with two samples, and one with each of them."""
    if isinstance(adapter, OwnSink):
        batch, inputs, lengths = two_samples(adapter, vocab_size)
        return (batch, inputs), [_one_sample(i, length, batch, inputs) for i, length in enumerate(lengths)]
    generator = torch.Generator().manual_seed(0)
    shape = _shape_of_one(adapter)
    first, second = torch.randn(2, 1, *shape, generator=generator, dtype=torch.float64)
    if isinstance(adapter, OwnItemsEncoder):
        return ({"media.0": first[0], "media.1": second[0]}, {}), [
            ({"media.0": each[0]}, {}) for each in (first, second)
        ]
    calls: list[Call] = [
        ({"media": each}, {}) if isinstance(adapter, OwnEncoder) else ({}, {"rows": each})
        for each in (torch.cat([first, second]), first, second)
    ]
    return calls[0], calls[1:]


def _shape_of_one(adapter: OwnAdapter) -> tuple[int, ...]:
    if isinstance(adapter, OwnItemsEncoder):
        return adapter.blank
    return adapter.media_shape if isinstance(adapter, OwnEncoder) else (adapter.in_features or 1,)


def _one_sample(i: int, length: int, batch: dict[str, Tensor], inputs: dict[str, Tensor]) -> Call:
    """Sample `i` of two, without the padding of the shorter one."""
    width = batch["input_ids"].shape[1]
    out = {key: batch[key][i : i + 1, :length] for key in ("input_ids", "position_ids")}
    half = len(batch["targets"]) // 2
    out["targets"] = batch["targets"][half * i : half * (i + 1)]
    out["target_positions"] = batch["target_positions"][half * i : half * (i + 1)] - width * i
    out |= {key: at[i : i + 1] - width * i for key, at in batch.items() if key.startswith("positions.")}
    return out, {source: rows[i : i + 1] for source, rows in inputs.items()}
