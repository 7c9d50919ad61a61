"""What a built module (on the meta device) shows: the sizes that determine its costs, and layers whose result or
gradient depends on which samples are computed together, which would train differently in each layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from torch import nn

from hetmesh.attention.mixers import mixers
from hetmesh.cost import LayerShape, ModuleShape, WeightShape
from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Adapter
from hetmesh.models.generator import GeneratorAdapter
from hetmesh.models.mixer_shape import in_order, recurrence_of
from hetmesh.parallel.experts.block import INNER, WITHIN, ExpertLayers
from hetmesh.parallel.key_heads import KeyHeads
from hetmesh.parallel.linear import OwnRows
from hetmesh.parallel.tensor_parallel import matches, matching, within

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OF_QUERIES, _OF_KEYS = {"q_proj": 1, "to_q": 1, "qkv": 3}, {"k_proj": 1, "to_k": 1, "qkv": 3}
"""Names of projections, and the number of equal parts of their outputs."""
HEAD = "lm_head"
"""The layer of an LLM that runs only on target positions."""


def module_shape(name: str, adapter: Adapter, module: nn.Module, plan: Mapping[str, Any] | None = None) -> ModuleShape:
    """The sizes of `module`, which `adapter` built.

    Linear layers and routers multiply each row once; a row multiplies as many experts as it chooses. In a stack of
    convolutions the last gives one output per row, each earlier one as many as the later strides cover. Attention is
    recognised by its `q_proj` or `to_q`, whose output is as wide as all query heads (a gate beside them does not
    count), by one `qkv` for all three, or as an `nn.MultiheadAttention`; other token mixers as
    `hetmesh.attention.mixers` finds them; of what is none of these the linear layers count. `plan`: for tensor
    parallelism; None: the adapter's.
    """
    plan = adapter.tensor_parallel_plan() if plan is None else plan
    abilities = adapter.abilities
    experts = _experts(abilities.experts)
    uses, dims = _uses(module) | {fqn: e.per_row for fqn, e in experts.items()}, _tp_dims(module, plan)
    seldom = [fqn for fqn, _ in module.named_modules() if any(matches(fqn, part) for part in abilities.per_item)]
    uses |= {f"{fqn}.weight": 0 for fqn in seldom}
    dims |= {fqn: e.tp_dim for fqn, e in experts.items() if e.tp_dim is not None}
    key_heads = next((style.heads for style in plan.values() if isinstance(style, KeyHeads)), 0)
    layers, llm = [], adapter.out_features is None and not isinstance(adapter, GeneratorAdapter)
    styles = [(pattern, style) for pattern, style in plan.items() if isinstance(style, OwnRows)]
    # of which tensor-parallel ranks use rows of their own
    own_rows = {f"{fqn}.{row}" for pattern, style in styles for fqn in matching(module, pattern) for row in style.rows}
    seen: set[str] = set()
    # names as named_parameters() has them, so that a tied parameter has one name wherever it is used
    names = {id(p): fqn for fqn, p in module.named_parameters()}

    def shape_of(fqn: str, parameter: nn.Parameter) -> WeightShape:
        first = names[id(parameter)]
        within = experts[first].within if first in experts else None
        shape = tuple(parameter.shape) or (1,)  # a scalar counts as a vector
        rows = first in own_rows
        return WeightShape(first, shape, uses.get(fqn, 0), parameter.requires_grad, dims.get(first), within, rows)

    for layer in adapter.layers():
        part = module.get_submodule(layer)
        weights = {f"{layer}.{key}": p for key, p in part.named_parameters()}
        found = list(mixers(part)) if abilities.token_gathered else []
        held = [f"{layer}.{fqn}" for fqn, inner in part.named_modules() if inner in found]
        weights = {key: weights[key] for key in in_order(weights, held)}
        seen |= {names[id(p)] for p in weights.values()}
        on_targets = llm and layer == HEAD
        attending = {fqn: p for fqn, p in part.named_modules() if not within(f"{layer}.{fqn}", *held)}
        width = _projected_width(attending, _OF_QUERIES) - _gate_width(attending)
        sizes = width, on_targets, _projected_width(attending, _OF_KEYS), llm and width > 0
        shares = on_targets and abilities.head == layer
        tokens = max(abilities.tokens_per_row, 1) if layer not in abilities.on_rows else 1
        attention = (abilities.attention_copies, key_heads, abilities.row_copies) if width else (0, 0, 0)
        shapes = tuple(starmap(shape_of, weights.items()))
        chunks = on_targets and abilities.loss_by_chunks
        states = tuple(map(recurrence_of, found))
        layers.append(LayerShape(layer, shapes, *sizes, shares, tokens, *attention, chunks, states))
    rest = {fqn: p for fqn, p in module.named_parameters() if fqn not in seen}
    if rest:
        layers.insert(0, LayerShape("", tuple(starmap(shape_of, rest.items()))))
    return ModuleShape(name, tuple(layers), abilities.gathered_whole)


def _uses(module: nn.Module) -> dict[str, int]:
    """Per FQN of a weight how many times it multiplies each row; weights that do not multiply are left out."""
    uses: dict[str, int] = {}
    outputs = 1
    for fqn, part in reversed(list(module.named_modules())):
        prefix = f"{fqn}." if fqn else ""
        if isinstance(part, nn.Linear):
            uses[f"{prefix}weight"] = 1
        elif isinstance(part, nn.MultiheadAttention):
            uses |= {f"{prefix}{key}": 1 for key in ("in_proj_weight", "q_proj_weight", "k_proj_weight")}
            uses[f"{prefix}v_proj_weight"] = 1
        elif isinstance(part, _CONVOLUTIONS):
            uses[f"{prefix}weight"] = outputs
            outputs *= math.prod(part.stride)
    return uses


@dataclass(frozen=True)
class _Use:
    per_row: int
    tp_dim: int | None = None
    within: int | None = None


def _experts(layers: ExpertLayers | None) -> dict[str, _Use]:
    """The use of the parameters of routers and experts, by FQN."""
    found: dict[str, _Use] = {}
    if layers is None:
        return found
    for block in layers.blocks:
        found[f"{block}.gate.weight"] = _Use(1)
        found |= {f"{block}.experts.{key}": _Use(layers.chosen, INNER[key], WITHIN[key]) for key in INNER}
    return found


def _gate_width(parts: Mapping[str, nn.Module]) -> int:
    """Of all `q_proj` among `parts`, what they make beside queries."""
    width = 0
    for fqn, part in parts.items():
        keys, groups = getattr(part, "k_proj", None), getattr(part, "num_key_value_groups", 0)
        if (queries := parts.get(f"{fqn}.q_proj")) is not None and keys is not None and groups:
            width += max(getattr(queries, "out_features", 0) - groups * getattr(keys, "out_features", 0), 0)
    return width


def _projected_width(parts: Mapping[str, nn.Module], projections: Mapping[str, int]) -> int:
    """The summed output width of the projections among `parts`, each over its number of equal parts."""
    width = 0
    for fqn, part in parts.items():
        kind = fqn.rpartition(".")[2]
        if isinstance(part, nn.MultiheadAttention):
            width += part.embed_dim
        elif kind in projections:  # with LoRA it is not an nn.Linear
            width += getattr(part, "out_features", 0) // projections[kind]
    return width


def _tp_dims(module: nn.Module, plan: Mapping[str, Any]) -> dict[str, int]:
    """Per FQN of a parameter the dim that tensor parallelism splits; replicated ones are left out."""
    dims: dict[str, int] = {}
    for fqn, part in module.named_modules():
        style = next((style for pattern, style in plan.items() if matches(fqn, pattern)), None)
        kind = style if isinstance(style, str) else type(style).__name__.lower()  # a ParallelStyle of any library
        if kind.startswith("colwise"):
            embedding = isinstance(part, nn.Embedding)
            dims |= {f"{fqn}.{key}": 1 if embedding else 0 for key, _ in part.named_parameters(recurse=False)}
        elif kind.startswith("rowwise"):
            dims[f"{fqn}.weight"] = 0 if isinstance(part, nn.Embedding) else 1
    return dims


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # and their lazy forms


def check_batch_statistics(name: str, model: str, module: nn.Module) -> None:
    """Raise RecipeError if layers of the module `name` of a recipe depend on the batch of a lane."""
    instead = "or, where they are frozen, fold the running statistics into a layer that keeps none"
    if reason := batch_dependence(module, instead):
        raise RecipeError(f"modules.{name}.model = {model!r}: {reason}")


def batch_dependence(module: nn.Module, instead: str, *, training_only: bool = False) -> str | None:
    """Which layers of `module` depend on what a lane and microbatch hold, and what to do `instead`; None: none does.

    BatchNorm of any kind does (SyncBatchNorm too: microbatches are normalised separately, and lanes without samples run
    on blank ones), any other layer that tracks running statistics, and embeddings with some options.
    """
    layers = {
        name: type(part).__name__
        for name, part in module.named_modules()
        if (isinstance(part, _BATCH_NORMS) or getattr(part, "track_running_stats", False))
        and (part.training or not training_only)
    }
    if layers:
        return (
            f"its layers {list(layers)[:4]}{' and more' if len(layers) > 4 else ''} are "
            f"{', '.join(sorted(set(layers.values())))}, whose result depends on the samples that are computed "
            f"together and would change with lanes and microbatches; use LayerNorm, GroupNorm or RMSNorm, {instead}"
        )
    reasons = {
        "max_norm": "each lane rescales the rows that it looks up, and replicas drift",
        "scale_grad_by_freq": "gradients depend on what a microbatch of a lane holds",
        "sparse": "sparse gradients are not summed over lanes",
    }
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    clauses = [f"{fqn!r} has {key}: {why}" for fqn, part in parts for key, why in reasons.items() if getattr(part, key)]
    return f"its embedding {'; '.join(clauses[:4])}. Leave the option out" if clauses else None
