"""The pieces of a drawn recipe, one function per feature: each chooses only what is documented as supported."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from hetmesh.recipe.batch_sizes import divisors
from hetmesh.schedule.bubble_fill import INNER_SCHEDULES
from support.recipe_balance import balance, bubble_fill
from support.recipe_draft import MESH, SINK, Draft, Piece, Table, some, sometimes
from support.recipe_experts import expert_layout, experts
from support.recipe_generators import generators
from support.recipe_runs import runs

POLICIES = ("sequential", "1f1b", "interleaved", "zero_bubble", "three_phase")


def schedule(draw: st.DrawFn, draft: Draft) -> None:
    """The policy and its options."""
    policy = draw(st.sampled_from(INNER_SCHEDULES if draft.gaps else POLICIES))
    keys: Table = {"pipeline_parallel_schedule": policy}
    if policy == "three_phase":
        keys |= some(
            draw,
            three_phase_window=st.integers(1, 3),
            three_phase_recompute=st.just(True),
            three_phase_offload=st.just(True),
        )
    if policy == "interleaved":
        keys |= some(draw, interleaved_early_warmup=st.booleans())
    draft.table("parallelism").update(keys)


def layouts(draw: st.DrawFn, draft: Draft) -> None:
    """Ranks and degrees of every module: the same ranks as the LLM, disjoint ones, overlapping ones, in any order; a
    module without a table takes its consumer's mesh; or one flat table for all."""
    flat = sometimes(draw, 8)
    degrees = _degrees(draw, draft, SINK, draft.world, flat)
    order = draw(st.permutations(range(draft.world))) if sometimes(draw, 2) else list(range(draft.world))
    own = order[: math.prod(degrees.values())]
    if flat:
        draft.table("parallelism").update(_layout_keys(degrees))
        return
    draft.table("parallelism")[SINK] = {"ranks": own, **_layout_keys(degrees)}
    if degrees["tensor_parallel_degree"] > 1 and sometimes(
        draw, 2 if draft.gaps else 4
    ):  # what can run in the LLM's collectives
        beside = {"ranks": own, **_layout_keys({"data_parallel_replicate_degree": len(own)})}
        draft.table("parallelism").update({name: dict(beside) for name in draft.modules if name != SINK})
        return
    for name in reversed(draft.modules):  # consumers first
        if name == SINK or sometimes(draw, 4):
            continue
        if name in draft.encoders and sometimes(draw, 4) and (table := _on_lanes(draw, draft, name)):
            draft.table("parallelism")[name] = table
            continue
        relation = draw(st.sampled_from(["disjoint", "any", "identical"]))
        free = {
            "disjoint": [rank for rank in order if rank not in own],
            "any": order,
            "identical": draw(st.permutations(own)) if sometimes(draw, 2) else own,
        }[relation] or list(order)
        degrees = _degrees(draw, draft, name, len(free))
        count = math.prod(degrees.values())
        if relation == "any":
            first = draw(st.integers(0, len(free) - count))
            free = free[first:]
        if relation == "identical" and count < len(free):  # data parallelism takes up the rest
            rest = len(free) // count
            degrees["data_parallel_replicate_degree"] *= rest
            count *= rest
        draft.table("parallelism")[name] = {"ranks": list(free[:count]), **_layout_keys(degrees)}


def _on_lanes(draw: st.DrawFn, draft: Draft, name: str) -> Table:
    """The layout of an encoder on the LLM's ranks, several lanes of it on those of each of the LLM's; empty if there is
    none."""
    table = draft.layout(SINK)
    shape = [table.get(key, 1) for key in MESH]
    per_lane = shape[0] * shape[3] * shape[4]
    stages = [n for n in (1, 2) if n <= len(draft.layers.get(name, ()))]
    fit = [
        (pp, tp)
        for pp in stages
        for tp in (1, 2, 4)
        if draft.heads[name] % tp == 0 == per_lane % (pp * tp) and per_lane > pp * tp
    ]
    if not fit:
        return {}
    pp, tp = draw(st.sampled_from(fit))
    by_lane = np.array(table["ranks"]).reshape(shape[0], draft.lanes, -1).swapaxes(0, 1)
    ranks = by_lane.reshape(draft.lanes, pp, -1, tp).swapaxes(0, 1)  # stage, lane of the LLM, own lane, shard
    degrees = {"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp}
    degrees["data_parallel_replicate_degree"] = ranks.size // (pp * tp)
    return {"ranks": ranks.ravel().tolist(), **_layout_keys(degrees)}


def _degrees(draw: st.DrawFn, draft: Draft, name: str, most: int, flat: bool = False) -> dict[str, int]:
    """Degrees of one module whose product is at most `most`; of a flat table those that every module can have."""
    left = most
    found: dict[str, int] = {}

    def choose(key: str, choices: list[int], often: bool = False) -> None:
        nonlocal left
        fit = [n for n in choices if 1 < n <= left]
        found[key] = draw(st.sampled_from([1, *fit] if often else [1, 1, *fit])) if fit else 1
        left //= found[key]

    split = 1 if flat else len(draft.layers.get(name, ()))
    choose("pipeline_parallel_degree", list(range(2, min(split, 4) + 1)), often=True)
    choose("tensor_parallel_degree", [n for n in (2, 4) if draft.heads[name] % n == 0], often=True)
    choose("context_parallel_degree", [2, 3, 4] if name in draft.shares_tokens and not flat else [])
    choose("data_parallel_shard_degree", [2, 3, 4])
    choose("data_parallel_replicate_degree", [2, 3, 4])
    return found


def _layout_keys(degrees: dict[str, int]) -> Table:
    return {key: degree for key, degree in degrees.items() if degree > 1}


def stages(draw: st.DrawFn, draft: Draft) -> None:
    """Where modules are cut: by default, by layers per stage, or layer by layer; several stages per rank."""
    for name in draft.layers:
        table = draft.tables["parallelism"].get(name)
        pp = 1 if table is None else table.get("pipeline_parallel_degree", 1)
        if table is None or pp == 1:
            continue
        layers = draft.layers[name]
        how = draw(st.sampled_from(["default", "per stage", "by name"]))
        sizes = [n for n in range(1, len(layers)) if pp * -(-len(layers) // (n * pp)) <= len(layers)]
        if how == "per stage" and sizes and draft.tables["modules"][name]["model"] != "whisper":
            table["pipeline_parallel_layers_per_stage"] = draw(st.sampled_from(sizes))
        first, last = draft.together.get(name, (1, 1))
        places = range(first, len(layers) - last + 1)
        if how == "by name" and layers[0] != "conv1" and pp <= len(places) + 1:
            count = pp * draw(st.sampled_from([n for n in (1, 2) if n * pp <= len(places) + 1]))
            cuts = draw(st.permutations(places))[: count - 1]
            ends = [0, *sorted(cuts), len(layers)]
            table["module_fqns_per_model_part"] = [list(layers[a:b]) for a, b in itertools.pairwise(ends)]


def batches(draw: st.DrawFn, draft: Draft) -> None:
    """Microbatches, their number, and accumulation; the batch of a lane need not be a power of two."""
    table, lanes = draft.layout(SINK), draft.lanes
    if whole := draft.table("training").get("global_batch_size"):  # of the run that goes on
        local = draw(st.sampled_from(divisors(whole // lanes)))
        draft.table("training")["local_batch_size"] = local
        table["pipeline_parallel_microbatch_size"] = draw(st.sampled_from(divisors(local)))
        return
    size, count = draw(st.sampled_from([1, 2])), draw(st.integers(1, 4 if lanes == 1 else 3))
    table["pipeline_parallel_microbatch_size"] = size
    training = draft.table("training")
    training["local_batch_size"] = size * count
    if size * count * lanes <= 4 and sometimes(draw):
        training["global_batch_size"] = size * count * lanes * draw(st.integers(2, 3))


def packing(draw: st.DrawFn, draft: Draft) -> None:
    """Samples of a lane in one row; masks, which pack by themselves."""
    if SINK not in draft.shares_tokens:
        return
    if sometimes(draw):
        draft.table("training")["pack_samples"] = True
    if sometimes(draw):
        masks = st.sampled_from(["isolated_media", "bidirectional_media"])
        draft.tables["modules"][SINK]["attention_mask"] = draw(masks)


def token_assignment(draw: st.DrawFn, draft: Draft) -> None:
    """Who keeps which token."""
    if any(draft.degree(name, "context") > 1 for name in draft.shares_tokens):
        policies = st.sampled_from(["balanced", "contiguous", "zigzag", "lpt"])
        table = draft.layout(SINK) if draft.degree(SINK, "context") > 1 else draft.table("parallelism")
        table.update(some(draw, context_parallel_assignment=policies))


def sequence_parallelism(draw: st.DrawFn, draft: Draft) -> None:
    """Activations split over tensor parallel ranks."""
    own, module = draft.tables["parallelism"].get(SINK, {}), draft.tables["modules"][SINK]
    whole = (
        SINK in draft.shares_tokens
        and SINK not in draft.whole
        and not (":" in module["model"] and draft.degree(SINK, "pipeline") > 1)
    )
    if own.get("tensor_parallel_degree", 1) > 1 and whole and sometimes(draw, 2):
        own["enable_sequence_parallel"] = True


def shares_of_encoders(draw: st.DrawFn, draft: Draft) -> None:
    """The same for encoders."""
    for name in draft.encoders:
        own, module = draft.tables["parallelism"].get(name, {}), draft.tables["modules"][name]
        splits = module["model"] in SPLIT_ENCODERS and name not in draft.whole
        if own.get("tensor_parallel_degree", 1) > 1 and splits and sometimes(draw, 2):
            own["enable_sequence_parallel"] = True


SPLIT_ENCODERS = ("siglip", "clip", "whisper", "qwen3_vl_vision", "hf_encoder", "support.user_models:Tower")
"""Encoders that can share what lies between attention and MLP."""


def freezing(draw: st.DrawFn, draft: Draft) -> None:
    """Frozen modules and low-rank adapters, at least one parameter being trained."""
    modules = draft.tables["modules"]
    if not sometimes(draw, 2):
        return
    trained = draw(st.sampled_from([name for name in draft.modules if modules[name].get("trainable", True)]))
    for name in draft.modules:
        if name != trained and draw(st.booleans()):
            modules[name]["trainable"] = False
    blocks = [name for name in draft.modules if not modules[name]["model"].endswith(("mlp", ":Widen"))]
    for name in blocks:
        if modules[name].get("trainable", True) and sometimes(draw, 3):
            modules[name]["lora"] = {"rank": draw(st.integers(1, 3))}
            names = LORA_LAYERS.get(modules[name]["model"])
            if names and sometimes(draw, 2):
                modules[name]["lora"]["target_modules"] = draw(st.sampled_from(names))
        elif modules[name].get("trainable", True) and modules[name]["model"] in LORA_LAYERS and sometimes(draw, 3):
            modules[name]["trainable"] = draw(st.sampled_from(PATTERNS))


def dropout(draw: st.DrawFn, draft: Draft) -> None:
    """Random masks: before adapters, and on hidden states of the models that have it. More often, and with adapters of
    their own, where one process draws the same (`support.dropout_oracles`), a strict test and a rare layout."""
    alike = _draws_alike(draft)
    for module in draft.tables["modules"].values():
        names = BEFORE_COLUMNS.get(module["model"])
        if alike and names and module.get("trainable", True) is True and sometimes(draw, 2):
            module["lora"] = {"rank": draw(st.integers(1, 3)), "target_modules": draw(st.sampled_from(names))}
        if "lora" in module and sometimes(draw, 2):
            module["lora"]["dropout"] = 0.25
        if module["model"] == "whisper" and sometimes(draw, 2):
            module["config"]["dropout"] = 0.25


def _draws_alike(draft: Draft) -> bool:
    """Whether all modules have one lane and nothing is packed."""
    lanes = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "context_parallel_degree")
    packed = draft.table("training").get("pack_samples") or "attention_mask" in draft.tables["modules"][SINK]
    return not packed and all(draft.layout(name).get(key, 1) == 1 for name in draft.modules for key in lanes)


LORA_LAYERS = {
    "qwen3": [["q_proj"], ["o_proj", "down_proj"], ["v_proj", "up_proj"]],
    "llama": [["q_proj"], ["o_proj", "down_proj"], ["v_proj", "up_proj"]],
    "siglip": [["q_proj", "out_proj"], ["fc1"], ["fc2"]],
}
"""Names of linear layers that may get adapters alone."""

PATTERNS = [["norm"], [r"!layers\.0\."], [r"layers\.0\.", "norm"], ["q_proj|k_proj"], ["proj|fc", r"!self_attn\."]]
"""Names of parameters that are trained alone; each matches some of any of these models."""

BEFORE_COLUMNS = {
    "qwen3": [["q_proj"], ["v_proj", "up_proj"], ["k_proj", "gate_proj"]],
    "llama": [["q_proj"], ["v_proj", "up_proj"], ["k_proj", "gate_proj"]],
    "siglip": [["q_proj", "v_proj"], ["fc1"]],
    "flow": [["q_proj", "v_proj"], ["up_proj"]],
}
"""Of names of linear layers those whose inputs tensor-parallel ranks hold alike."""


def checkpointing(draw: st.DrawFn, draft: Draft) -> None:
    """What the backward computes again, for all modules or for one."""
    modes = st.sampled_from(["full", "selective", "none"])
    if sometimes(draw):
        draft.tables["activation_checkpoint"] = {"mode": draw(modes)}
        if draft.tables["activation_checkpoint"]["mode"] == "selective" and draw(st.booleans()):
            ops = st.sampled_from(["aten.linear", "aten.mm", "aten.scaled_dot_product_attention"])
            draft.tables["activation_checkpoint"]["save_ops"] = draw(st.lists(ops, min_size=1, max_size=2))
    if sometimes(draw, 4):
        draft.tables["modules"][draw(st.sampled_from(draft.modules))]["activation_checkpoint"] = draw(modes)


def sharding(draw: st.DrawFn, draft: Draft) -> None:
    """When FSDP lets gathered parameters go, and whether shards live on the CPU."""
    sharded = [name for name in draft.modules if draft.degree(name, "shard") > 1]
    splits = draft.table("parallelism")["pipeline_parallel_schedule"] == "zero_bubble"
    for name in sharded:
        split = splits and draft.degree(name, "pipeline") > 1
        choices = st.sampled_from(["never"] if split else ["always", "never"])
        draft.layout(name).update(some(draw, fsdp_reshard_after_forward=choices))
    if sharded and sometimes(draw, 6):
        draft.table("training")["enable_cpu_offload"] = True


def precision(draw: st.DrawFn, draft: Draft) -> None:
    """fp64, so that the last digits count; now and then fp32."""
    draft.table("training")["dtype"] = "float32" if sometimes(draw, 8) else "float64"


def seeds(draw: st.DrawFn, draft: Draft) -> None:
    """The seed of weights and of the order of samples."""
    draft.table("debug")["seed"] = draw(st.integers(0, 9))


def sample_order(draw: st.DrawFn, draft: Draft) -> None:
    """Samples in the source's order, by length, or of two sources whose shares change after the first step."""
    data = draft.table("data")
    if data["source"] == "digits" or sometimes(draw, 2):  # the plain loop over digits has its own loader
        return
    order = draw(st.sampled_from(["given", "tokens", SINK, "phases"]))
    if order != "phases":
        data["order"] = order
        return
    source, options = data.pop("source"), data.pop("options")
    other = copy.deepcopy(options) | ({"seed": options["seed"] + 100} if "seed" in options else {})
    data["mixture"] = [{"source": source, "name": name, "options": o} for name, o in (("a", options), ("b", other))]
    data["phases"] = [{"start_step": 0, "weights": {"a": 1.0}}, {"start_step": 1, "weights": {"a": 1.0, "b": 2.0}}]


PIECES: tuple[Piece, ...] = (
    generators,
    schedule,
    layouts,
    stages,
    batches,
    packing,
    token_assignment,
    sequence_parallelism,
    freezing,
    dropout,
    checkpointing,
    sharding,
    precision,
    seeds,
    balance,
    bubble_fill,
    experts,
    expert_layout,
    runs,
    shares_of_encoders,
    sample_order,
)
"""In the order in which they are drawn: later ones read what earlier ones chose.

`[data] num_workers` is not drawn. The parity harness loads samples in the process that trains: a worker of a pool has
threads (process groups, the watchdog), so every loading process would come from a fork server that imports torch, some
seconds per rank and recipe on a machine with few cores, and would outlive a pool that is ended. What may go wrong with
them lies between processes and not in the layout; `tests/training/test_loading.py` compares runs with and without.
"""

LAYOUT: tuple[Piece, ...] = (
    schedule,
    layouts,
    stages,
    batches,
    token_assignment,
    sequence_parallelism,
    checkpointing,
    sharding,
    balance,
    bubble_fill,
    expert_layout,
    shares_of_encoders,
)
"""Those that say where and how a model is trained, and not what it is: a run may go on with other ones."""


def another_layout(draw: st.DrawFn, draft: Draft) -> Table | None:
    """Tables with which the run of a recipe can go on from its checkpoints in another layout; None if none was found
    whose lanes divide its batch."""
    kept = {name: table for name, table in draft.tables.items() if name not in ("parallelism", "balance")}
    kept.pop("activation_checkpoint", None)
    kept["training"] = {k: v for k, v in draft.tables["training"].items() if k not in OF_LAYOUT}
    for _ in range(4):
        other = replace(draft, tables=copy.deepcopy(kept))
        for piece in LAYOUT[:2]:
            piece(draw, other)
        if other.tables["training"]["global_batch_size"] % other.lanes:
            continue
        modules = copy.deepcopy(other.tables["modules"])
        for piece in LAYOUT[2:]:
            piece(draw, other)
        other.tables["modules"] = modules
        found = {n: other.tables[n] for n in ("parallelism", "balance", "activation_checkpoint") if n in other.tables}
        return found | {"training": {k: v for k, v in other.tables["training"].items() if k in OF_LAYOUT}}
    return None


OF_LAYOUT = ("local_batch_size", "enable_cpu_offload")
"""Keys of `[training]` that belong to a layout."""
