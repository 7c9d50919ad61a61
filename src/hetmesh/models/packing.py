"""From the batch of a lane to what a rank reads of it: packing, context parallelism, shares of the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.packed_rows import PackedRows, with_tensors
from hetmesh.balance import BatchPlan
from hetmesh.graph import Stage
from hetmesh.layout import Intervals
from hetmesh.models.adapter import Adapter
from hetmesh.parallel.tokens import positions_in_share


def lane_batch(
    adapter: Adapter, batch: Mapping[str, Any], plan: BatchPlan, stage: Stage, microbatch: int, rank: int
) -> Mapping[str, Any]:
    """What `rank` reads of the batch that `Adapter.collate` made of its lane: all of it, or, of packed samples and of
    media whose tokens ranks share, `PackedRows` of what it keeps. Where ranks along `tp` share tokens, it also says
    where positions lie in the rank's share (`positions_in_share`); for experts, `lane_samples`."""
    spec = plan.graph[stage.module]
    mesh, lane = spec.stage_mesh(stage.index), spec.lane_of(rank)
    assert lane is not None
    place = dict(zip(mesh.axes, mesh.coordinate(rank) or (), strict=True))
    lengths = [plan.samples[i].tokens for i in plan.samples_of(spec.name, microbatch, lane)]
    share = adapter.abilities.share if spec.tokens_per_row else None
    kept: Intervals = ((0, sum(lengths)),)
    if packed := spec.packed or share is not None:
        shares = plan.lane_tokens(spec.name, microbatch, lane).shares
        kept = shares[place.get("cp", 0)]
        ranks = next(group for group in mesh.axis_groups("cp") if rank in group) if "cp" in mesh.axes else (rank,)
        mask, name = plan.lane_mask(spec.name, microbatch, lane), f"{spec.name} attention"
        rows = share(batch, kept) if share is not None else pack_tokens(batch, lengths, kept)
        batch = PackedRows(rows, ContextAttention(mask, shares, ranks, name=name, microbatch=microbatch))
    if adapter.abilities.experts is not None and (packed or len(lengths) <= 1):
        per_token = plan.num_targets / max(plan.num_tokens, 1)
        batch = with_tensors(batch, {**batch, **lane_samples(lengths, kept, per_token)})
    if "tp" in spec.token_axes:
        batch = with_tensors(batch, {**batch, **positions_in_share(batch, place["tp"], mesh.axis_size("tp"))})
    return batch


def pack_tokens(batch: Mapping[str, Tensor], lengths: Sequence[int], kept: Intervals) -> dict[str, Tensor]:
    """The batch of `collate_tokens`, its samples one after another in one row, cut to the tokens of one rank.

    Args:
        kept: positions in that row that the rank keeps, in its order.

    Returns:
        `input_ids`, `position_ids`: int64 `[1, kept]`, positions of several axes `[axes, 1, kept]`; positions start
        anew with each sample.
        `targets`, `target_positions`: those whose predicting token the rank keeps; positions in its own order.
        `target_index`: int64, which of the lane's targets they are.
        `values.<name>`: of these targets.
        `positions.<placeholder>`: positions, in the rank's own order, of the placeholders that it keeps, ascending.
    """
    rows, width = batch["input_ids"].shape
    columns = torch.arange(width)
    real = (columns < torch.tensor(lengths, dtype=torch.int64).reshape(rows, 1)).flatten().nonzero().flatten()
    row_of = torch.full((rows * width,), -1)
    row_of[real] = torch.arange(len(real))
    mine = torch.cat([torch.arange(a, b) for a, b in kept]) if kept else torch.zeros(0, dtype=torch.int64)
    place = torch.full((len(real),), -1)
    place[mine] = torch.arange(len(mine))
    out = {key: batch[key].flatten(-2)[..., real][..., mine].unsqueeze(-2) for key in ("input_ids", "position_ids")}
    predicting = place[row_of[batch["target_positions"]]]
    out["target_index"] = (predicting >= 0).nonzero().flatten()
    out["target_positions"] = predicting[out["target_index"]]
    out["targets"] = batch["targets"][out["target_index"]]
    for key, positions in batch.items():
        if key.startswith("positions."):
            found = place[row_of[positions]]
            out[key] = found[found >= 0].sort().values
        elif key.startswith("values."):
            out[key] = positions[out["target_index"]]
    return out


def lane_samples(lengths: Sequence[int], kept: Intervals, targets_per_token: float) -> dict[str, Tensor]:
    """Which samples the tokens of one rank belong to, for what a model computes per sample.

    Args:
        kept: positions in the row of all of them that the rank keeps, in its order.
        targets_per_token: of the global batch.

    Returns:
        `token_samples`: int64 `[kept]`: the sample of each token, by its place in the lane.
        `sample_tokens`: int64 `[samples]`: `lengths`.
        `sample_weights`: float64 `[samples]`: their tokens times `targets_per_token`; over the global batch they sum to
            its targets, by which the loss is divided.
    """
    tokens = torch.tensor(lengths, dtype=torch.int64)
    of_all = torch.repeat_interleave(torch.arange(len(lengths)), tokens)
    mine = torch.cat([of_all[a:b] for a, b in kept]) if kept else of_all[:0]
    return {"token_samples": mine, "sample_tokens": tokens, "sample_weights": tokens.double() * targets_per_token}
