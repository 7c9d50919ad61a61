"""The tensor parallel plan of a decoder: its config's own, without what hetmesh has no style for, else by names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from hetmesh.attention.mixers import looks_in_registry, mixers
from hetmesh.models.mixer_shape import LEAVING
from hetmesh.models.split.tower_plan import group_plan, layer_pattern, linear_group, repeated_blocks
from hetmesh.models.split.whole_model import WholeModel
from hetmesh.parallel.key_heads import KEY_HEADS, KeyHeads
from hetmesh.parallel.linear import OwnRows
from hetmesh.parallel.tensor_parallel import GRAD_ALLREDUCE, STYLES, matching, within

QUERY_HEADS, PROJECTIONS = "num_attention_heads", ("k_proj", "v_proj")
LINEAR_KEY_HEADS = "linear_num_key_heads"
NORMS = ("q_norm", "k_norm")
"""Norms of single heads, which work on a rank's heads where the attention is split."""


@dataclass(frozen=True)
class TextPlan:
    """How a decoder is split.

    Attributes:
        plan: with `KeyHeads` if ranks can share the key heads of all of its attentions.
        token_sharded: FQNs of the submodules that sequence parallelism splits the tokens of; none where a layer has
            neither an attention that is split nor a mixer, as whatever it has would see a share of the tokens alone.
        token_gathered: patterns of its token mixers that are no attention, which read all tokens.
    """

    plan: Mapping[str, Any]
    sizes: Mapping[str, int]
    token_sharded: tuple[str, ...]
    token_gathered: tuple[str, ...] = ()


def text_plan(whole: WholeModel, module: nn.Module) -> TextPlan:
    """The plan of the decoder inside `module`, the LLM without weights."""
    config, decoder = whole.text_config, whole.decoder
    own = {f"{decoder}.{pattern}": style for pattern, style in (config.base_model_tp_plan or {}).items()}
    own = {pattern: style for pattern, style in own.items() if matching(module, pattern)}
    # Some plans name no layer at all: Qwen3-VL's of transformers 5.24 has the embedding alone.
    plan: dict[str, Any] = _with_norms(_known(own, module), module) or _by_names(module, decoder)
    blocks = [name for name in repeated_blocks(module) if name.startswith(f"{decoder}.")]
    found = _mixers(module, blocks)
    others = tuple(dict.fromkeys(map(layer_pattern, found)))
    theirs = {p.rpartition(".")[0] for p in plan if any(within(m, *found) for m in matching(module, p))}
    plan = {pattern: style for pattern, style in plan.items() if not within(pattern, *theirs)}
    by_heads: dict[str, Any] = {}
    for name, part in found.items():
        holder = layer_pattern(name)
        by_heads |= _by_heads(holder, part) if found.keys() >= set(matching(module, holder)) else {}
    plan |= by_heads
    if whole.model.get_output_embeddings().weight is not whole.model.get_input_embeddings().weight:
        head = (whole.model_class._tp_plan or {}).get(whole.head)
        if plan and head not in STYLES and type(module.get_submodule(whole.head)) is nn.Linear:
            head = "colwise_gather_output"  # many models of transformers leave it out
        plan |= {whole.head: head} if head in STYLES else {}
    heads = (QUERY_HEADS, KEY_HEADS, *((LINEAR_KEY_HEADS,) if by_heads else ()))
    sizes = {key: getattr(config, key) for key in heads if getattr(config, key, None)}
    rows = {pattern.rpartition(".")[0] for pattern, style in plan.items() if style == "rowwise"}
    attention = {m for r in rows if "attn" in r or "attention" in r for m in matching(module, r)} - found.keys()
    plan |= _key_heads(plan, module, attention, sizes)
    everywhere = blocks and all(any(within(part, block) for part in (*attention, *found)) for block in blocks)
    children = [name for name, child in module.get_submodule(decoder).named_children() if list(child.parameters())]
    shared = tuple(f"{decoder}.{name}" for name in children if f"{decoder}.{name}" != whole.embedding)
    return TextPlan(
        MappingProxyType(plan), MappingProxyType(sizes if plan else {}), shared if everywhere else (), others
    )


def _mixers(module: nn.Module, blocks: Collection[str]) -> dict[str, nn.Module]:
    """The token mixers of blocks without attention, by FQN."""
    names = {part: name for name, part in module.named_modules()}
    parts = [module.get_submodule(block) for block in blocks]
    return {names[m]: m for part in parts if not any(map(looks_in_registry, part.modules())) for m in mixers(part)}


def _by_heads(holder: str, mixer: Any) -> dict[str, Any]:
    """The styles of a Gated DeltaNet, in modules that match `holder`, which gives each rank some key heads with the
    value heads that they serve; nothing for a mixer of another build. Fused queries, keys and values, and the
    convolution behind them, are three segments; where each row is of a key head, chunks are shares."""
    sizes = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
    if not all(isinstance(getattr(mixer, size, None), int) for size in (*sizes, "head_v_dim")):
        return {}
    heads, fused = (mixer.num_v_heads,), (mixer.key_dim, mixer.key_dim, mixer.value_dim)
    if any(p.shape != heads for p in mixer.parameters(recurse=False)):
        return {}
    rows: dict[str, tuple[int, ...]] = {name: heads for name, _ in mixer.named_parameters(recurse=False)}
    found: dict[str, Any] = {}
    for name, part in mixer.named_children():
        own = [len(p) for p in part.parameters()]
        plain = type(part) is nn.Linear and part.bias is None
        if plain and name in LEAVING and part.in_features == mixer.value_dim:
            found[f"{holder}.{name}"] = "rowwise"
        elif plain and own == [sum(fused)]:
            found[f"{holder}.{name}"] = OwnRows({"weight": fused})
        elif plain and part.out_features % mixer.num_k_heads == 0:
            found[f"{holder}.{name}"] = "colwise"
        elif type(part) is nn.Conv1d and own == [sum(fused)]:
            rows[f"{name}.weight"] = fused
        elif own == [mixer.head_v_dim]:
            found[f"{holder}.{name}"] = GRAD_ALLREDUCE
        elif own:
            return {}
    return found | {holder: OwnRows(rows, sizes)} if "rowwise" in found.values() else {}


def _key_heads(
    plan: Mapping[str, str], module: nn.Module, attention: Set[str], sizes: Mapping[str, int]
) -> dict[str, KeyHeads]:
    """The style of the attentions, by pattern, if each makes keys and values as `KeyHeads` expects; else nothing."""
    found: dict[str, KeyHeads] = {}
    for name in sorted(attention):
        holder, part = layer_pattern(name), module.get_submodule(name)
        heads, features = sizes.get(KEY_HEADS, 0), getattr(part, "head_dim", 0)
        split = all(plan.get(f"{holder}.{layer}") == "colwise" for layer in PROJECTIONS)
        widths = {getattr(getattr(part, layer, None), "out_features", 0) for layer in PROJECTIONS}
        groups = getattr(part, "num_key_value_groups", 0)
        split &= set(matching(module, holder)) <= attention
        if not (split and heads) or widths != {heads * features} or groups * heads != sizes.get(QUERY_HEADS):
            return {}
        found[holder] = KeyHeads(heads, features)
    return found


def _known(plan: Mapping[str, str], module: nn.Module) -> dict[str, str]:
    """The plan without the groups of which one style is not hetmesh's, or does not suit its module."""
    unknown = {pattern for pattern, style in plan.items() if style not in STYLES or not _suits(pattern, style, module)}
    holders = {pattern.rpartition(".")[0] for pattern in unknown}
    return {
        pattern: style
        for pattern, style in plan.items()
        if not any(pattern.startswith(f"{holder}.") for holder in holders)
    }


def _with_norms(plan: Mapping[str, str], module: nn.Module) -> dict[str, str]:
    """The plan with the norms of single heads, of which a plan of transformers may be silent (Qwen3-VL-MoE's): a rank
    with some of the heads has a part of their gradient."""
    found = dict(plan)
    for pattern, style in plan.items():
        holder, _, last = pattern.rpartition(".")
        for norm in NORMS:
            its = f"{holder}.{norm}"
            if style == "colwise" and last == f"{norm[0]}_proj" and matching(module, its):
                found.setdefault(its, GRAD_ALLREDUCE)
    return found


def _suits(pattern: str, style: str, module: nn.Module) -> bool:
    return style == GRAD_ALLREDUCE or all(
        type(module.get_submodule(name)) is nn.Linear for name in matching(module, pattern)
    )


def _by_names(module: nn.Module, decoder: str) -> dict[str, str]:
    plan: dict[str, str] = {}
    for name, part in module.get_submodule(decoder).named_modules():
        if (group := linear_group(part)) is not None:
            holder = layer_pattern(f"{decoder}.{name}")
            plan |= group_plan(holder, *group)
            plan |= {f"{holder}.{norm}": GRAD_ALLREDUCE for norm, _ in part.named_children() if norm in NORMS}
    return plan
