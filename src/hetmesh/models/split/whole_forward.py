"""Transformers' own forward of a whole directory, as the truth to compare its parts with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import SampleLike
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.models.split.processor import processor_at
from hetmesh.models.split.rope_index import media_tokens
from hetmesh.models.split.tower_alone import INPUTS
from hetmesh.models.split.whole_model import WholeModel


def load_whole(whole: WholeModel) -> Any:
    """The whole model with its weights in fp32, as transformers itself loads them."""
    return whole.model_class.from_pretrained(
        whole.pretrained.path,
        dtype=torch.float32,
        local_files_only=True,
        attn_implementation=whole.config._attn_implementation,
    )


def whole_logits(
    whole: WholeModel, model: Any, encoders: Mapping[str, HfEncoderAdapter], sample: SampleLike, meta: SampleMeta
) -> Tensor:
    """The logits `[targets, vocab]` of the targets of one expanded sample, by `model.forward` alone: no position, mask,
    row or head of hetmesh's. `encoders`: by placeholder what hands its items over."""
    parameters = inspect.signature(model.forward).parameters
    dtype = next(p.dtype for p in model.parameters())
    arguments: dict[str, Any] = {}
    batchings = {k: b for encoder in encoders.values() if encoder.units for k, b in encoder.units.batchings.items()}
    for kind, unit in sample.units.items():  # of one sample: what the processor made, as it is
        made = {key: value.to(dtype) if value.is_floating_point() else value for key, value in unit.items()}
        arguments |= batchings[kind].as_taken(made)
    for kind, items in sample.media.items():
        arguments[INPUTS[kind]] = torch.stack([item.to(dtype) for item in items])
    by_type = "mm_token_type_ids" in parameters or any("grid_thw" in name for name in arguments)
    if by_type and not whole.around:
        own = processor_at(whole.pretrained.path, str(whole.pretrained)).own if sample.units else None
        types = own and torch.tensor(own.create_mm_token_type_ids([sample.tokens.tolist()]))
        arguments["mm_token_type_ids"] = media_tokens(meta) if types is None else types
    if whole.family.mask == "bidirectional_runs" and "token_type_ids" in parameters:
        arguments["token_type_ids"] = media_tokens(meta)
    elif whole.family.mask == "prefix":
        first = min((start for start, _ in meta.targets), default=meta.tokens)
        arguments["token_type_ids"] = (torch.arange(meta.tokens) >= first).long()[None]
    ids = sample.tokens[None]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **arguments).logits[0]
    return torch.cat([logits[start - 1 : stop - 1] for start, stop in meta.targets])
