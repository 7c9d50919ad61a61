"""Units of a directory's processor as calls of its tower: one for each kind of media that it reads, also where a batch
has none of that kind, so that ranks which shard a tower together call it equally often."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import SampleLike
from hetmesh.models.config_keys import hf
from hetmesh.models.split.batching import Batching, batching_of
from hetmesh.models.split.made import Unit
from hetmesh.models.split.whole_model import WholeModel, features_of

MADE, TAKE = "made", "take"
"""In a batch: as many rows as are made in all, without features, whose number the host knows; which of these are the
samples' rows, -1 for a row of zeros, where they are not all of them in order."""


@dataclass(frozen=True, eq=False)
class UnitCalls:
    """Made by `unit_calls`.

    Attributes:
        batchings: by kind of media.
    """

    batchings: Mapping[str, Batching]

    def blank(self) -> dict[str, Any]:
        """The smallest item of each kind."""
        return self.collated({kind: [batching.examples[0]] for kind, batching in self.batchings.items()})

    def collated(self, units: Mapping[str, Sequence[Unit]]) -> dict[str, Any]:
        """Units by kind -> the tensors of all."""
        collated = {kind: self.batchings[kind].collate(each) for kind, each in units.items()}
        return {f"{kind}.{key}": value for kind, batch in collated.items() for key, value in batch.items()}

    def batch(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], ratio: int) -> dict[str, Any]:
        """The units of some samples. Rows of items that were cut are left out, and those of a sample that could not be
        read are zeros. `ratio`: rows for each that an item has in the sequence."""
        units: dict[str, list[Unit]] = {kind: [] for kind in self.batchings}
        made = dict.fromkeys(self.batchings, 0)
        places: list[tuple[str, int, int]] = []
        for sample, meta in zip(samples, metas, strict=True):
            at = dict(made)
            for item in (item for item in meta.media if item.name in made):
                first = at[item.name] if sample.units[item.name] else -1
                places.append((item.name, first, item.rows))
                at[item.name] += item.rows
            for kind in made:
                if unit := sample.units.get(kind):
                    units[kind].append(unit)
                    made[kind] += sample.unit_rows[kind]
        start, end = dict.fromkeys(made, 0), 0
        for kind, each in units.items():
            start[kind], end = end, end + (made[kind] or self.batchings[kind].blank_rows)
            each.extend([] if each else [self.batchings[kind].examples[0]])
        take = [
            torch.arange(ratio * (start[kind] + first), ratio * (start[kind] + first + rows))
            if first >= 0
            else torch.full((ratio * rows,), -1)
            for kind, first, rows in places
        ]
        rows, made_rows = torch.cat(take) if take else torch.zeros(0, dtype=torch.int64), torch.zeros(ratio * end, 0)
        try:
            collated = self.collated(units)
        except RuntimeError as error:  # of tensors that do not go together, though those did that were measured
            raise SampleError(
                f"samples {[sample.id for sample in samples]}: what the directory's processor makes of their media has "
                f"shapes that do not go into one batch ({error}); processor_options fix them (num_frames, size)"
            ) from error
        batch = {**collated, MADE: made_rows, "rows": torch.zeros(len(rows), 0)}
        return batch if torch.equal(rows, torch.arange(len(made_rows))) else {**batch, TAKE: rows}

    def rows(self, module: Any, batch: Mapping[str, Any], dtype: torch.dtype) -> list[Any]:
        """What the model's methods give for each kind."""
        outputs = []
        for kind, batching in self.batchings.items():
            method = features_of(module, kind)
            given = {key.removeprefix(f"{kind}."): value for key, value in batch.items() if key.startswith(f"{kind}.")}
            given = batching.as_taken(given)
            if method is None:
                outputs.append(features_of_padded(module, **arguments_of(features_of_padded, given, dtype)))
            else:
                outputs.append(method(**arguments_of(method, given, dtype), return_dict=True))
        return outputs


def taken(rows: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Of all rows those of the samples. Raises SampleError: there are others than the samples' units make."""
    if len(rows) != len(batch[MADE]):
        raise SampleError(f"{len(rows)} rows were made of media, {len(batch[MADE])} were planned")
    if TAKE not in batch:
        return rows
    take: Tensor = batch[TAKE]
    return torch.where((take < 0).view(-1, *[1] * (rows.ndim - 1)), 0, rows[take.clamp(min=0)])


def arguments_of(method: Any, given: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Of tensors by name those that `method` takes, in its floating-point dtype."""
    names = inspect.signature(method).parameters
    return {key: _cast(value, dtype) for key, value in given.items() if key in names}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(each, dtype) for each in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def unit_calls(whole: WholeModel, kinds: Sequence[str]) -> tuple[UnitCalls | None, str]:
    """How units of some kinds are given to the tower of a directory; None where it has no processor that prepares the
    first of them, with a reason where it has one. Raises RecipeError: it prepares no other one."""
    found: dict[str, Batching] = {}
    for kind in kinds:
        batching, reason = batching_of(whole, kind)
        if batching is None and not found:
            return None, reason
        if batching is None:
            raise RecipeError(reason or f"{whole.pretrained}: its processor prepares no {kind!r}")
        found[kind] = batching
    return UnitCalls(found), ""


def joined_rows(rows: Any) -> Tensor:
    """Rows `[n, features]` from a tensor, or from one tensor per item."""
    parts = [rows] if isinstance(rows, Tensor) else list(rows)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def features_of_padded(model: Any, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
    """The rows `[n, features]` of recordings, of a model without `get_audio_features`: tower and projector, and masks
    of both as its forward has them (transformers' `Qwen2AudioModel.forward`)."""
    tower = model.get_encoder("audio")
    lengths, rows = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    inside = torch.arange(tower.config.max_source_positions, device=lengths.device) < lengths[:, None]
    mask = hf("masking_utils.create_bidirectional_mask")(
        config=tower.config, inputs_embeds=input_features.new_zeros(*inside.shape, 1), attention_mask=inside.long()
    )
    hidden = tower(input_features, attention_mask=mask).last_hidden_state
    projected = model.base_model.multi_modal_projector(hidden)
    return projected[torch.arange(projected.shape[1], device=rows.device) < rows[:, None]]
