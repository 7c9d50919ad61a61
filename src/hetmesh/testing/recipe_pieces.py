"""The pieces of a drawn recipe, one function per feature: each chooses only what is documented as supported."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from hetmesh.balance import DEFERRING
from hetmesh.balance import POLICIES as BALANCERS
from hetmesh.schedule.bubble_fill import INNER
from hetmesh.testing.recipe_graphs import SINK, Draft, Table

POLICIES = ("sequential", "1f1b", "interleaved", "zero_bubble", "three_phase")

Piece = Callable[[st.DrawFn, Draft], None]


def sometimes(draw: st.DrawFn, one_in: int = 3) -> bool:
    """True once in so many draws; shrinks to False."""
    return draw(st.integers(0, one_in - 1)) == one_in - 1


def schedule(draw: st.DrawFn, draft: Draft) -> None:
    """The policy and its options."""
    policy = draw(st.sampled_from(POLICIES))
    keys: Table = {"pipeline_parallel_schedule": policy}
    if policy == "three_phase":
        keys |= _some(
            draw,
            three_phase_window=st.integers(1, 3),
            three_phase_recompute=st.just(True),
            three_phase_offload=st.just(True),
        )
    if policy == "interleaved":
        keys |= _some(draw, interleaved_early_warmup=st.booleans())
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
    for name in reversed(draft.modules):  # consumers first
        if name == SINK or sometimes(draw, 4):
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
    zero_bubble = draft.table("parallelism")["pipeline_parallel_schedule"] == "zero_bubble"
    choose("data_parallel_shard_degree", [] if zero_bubble else [2, 3, 4])
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
        if how == "by name" and layers[0] != "conv1":
            count = pp * draw(st.sampled_from([n for n in (1, 2) if n * pp <= len(layers)]))
            cuts = draw(st.permutations(range(1, len(layers))))[: count - 1]
            ends = [0, *sorted(cuts), len(layers)]
            table["module_fqns_per_model_part"] = [list(layers[a:b]) for a, b in itertools.pairwise(ends)]


def batches(draw: st.DrawFn, draft: Draft) -> None:
    """Microbatches, their number, and accumulation; the batch of a lane need not be a power of two."""
    table = draft.layout(SINK)
    lanes = table.get("data_parallel_replicate_degree", 1) * table.get("data_parallel_shard_degree", 1)
    size, count = draw(st.sampled_from([1, 2])), draw(st.integers(1, 4 if lanes == 1 else 3))
    table["pipeline_parallel_microbatch_size"] = size
    training = draft.table("training")
    training["local_batch_size"] = size * count
    if size * count * lanes <= 4 and sometimes(draw):
        training["global_batch_size"] = size * count * lanes * draw(st.integers(2, 3))


def packing(draw: st.DrawFn, draft: Draft) -> None:
    """Samples of a lane in one row; masks, which pack by themselves; who keeps which token."""
    if sometimes(draw):
        draft.table("training")["pack_samples"] = True
    if sometimes(draw):
        masks = st.sampled_from(["isolated_media", "bidirectional_media"])
        draft.tables["modules"][SINK]["attention_mask"] = draw(masks)
    if any(draft.degree(name, "context") > 1 for name in draft.shares_tokens):
        policies = st.sampled_from(["balanced", "contiguous", "zigzag", "lpt"])
        table = draft.layout(SINK) if draft.degree(SINK, "context") > 1 else draft.table("parallelism")
        table.update(_some(draw, context_parallel_assignment=policies))


def sequence_parallelism(draw: st.DrawFn, draft: Draft) -> None:
    """Activations split over tensor parallel ranks."""
    own = draft.tables["parallelism"].get(SINK, {})
    if own.get("tensor_parallel_degree", 1) > 1 and sometimes(draw, 2):
        own["enable_sequence_parallel"] = True


def freezing(draw: st.DrawFn, draft: Draft) -> None:
    """Frozen modules and low-rank adapters, at least one parameter being trained."""
    modules = draft.tables["modules"]
    if not sometimes(draw, 2):
        return
    trained = draw(st.sampled_from(draft.modules))
    for name in draft.modules:
        if name != trained and draw(st.booleans()):
            modules[name]["trainable"] = False
    blocks = [name for name in draft.modules if modules[name]["model"] != "mlp"]
    for name in blocks:
        if modules[name].get("trainable", True) and not _splits_tokens(draft, name) and sometimes(draw, 3):
            modules[name]["lora"] = {"rank": draw(st.integers(1, 3))}
            names = LORA_LAYERS.get(modules[name]["model"])
            if names and sometimes(draw, 2):
                modules[name]["lora"]["target_modules"] = draw(st.sampled_from(names))


def _splits_tokens(draft: Draft, name: str) -> bool:
    return draft.tables["parallelism"].get(name, {}).get("enable_sequence_parallel", False)


def dropout(draw: st.DrawFn, draft: Draft) -> None:
    """Random masks: before adapters, and on hidden states of the models that have it. More often, and with adapters of
    their own, where one process draws the same (`hetmesh.testing.dropout`), a strict test and a rare layout."""
    alike = _draws_alike(draft)
    for name, module in draft.tables["modules"].items():
        names = BEFORE_COLUMNS.get(module["model"])
        if alike and names and module.get("trainable", True) and not _splits_tokens(draft, name) and sometimes(draw, 2):
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

BEFORE_COLUMNS = {
    "qwen3": [["q_proj"], ["v_proj", "up_proj"], ["k_proj", "gate_proj"]],
    "llama": [["q_proj"], ["v_proj", "up_proj"], ["k_proj", "gate_proj"]],
    "siglip": [["q_proj", "v_proj"], ["fc1"]],
}
"""Of these names those whose inputs tensor-parallel ranks hold alike."""


def checkpointing(draw: st.DrawFn, draft: Draft) -> None:
    """What the backward computes again, for all modules or for one."""
    if draft.table("parallelism")["pipeline_parallel_schedule"] == "zero_bubble":
        return
    modes = st.sampled_from(["full", "selective", "none"])
    if sometimes(draw):
        draft.tables["activation_checkpoint"] = {"mode": draw(modes)}
    if sometimes(draw, 4):
        draft.tables["modules"][draw(st.sampled_from(draft.modules))]["activation_checkpoint"] = draw(modes)


def sharding(draw: st.DrawFn, draft: Draft) -> None:
    """When FSDP lets gathered parameters go, and whether shards live on the CPU."""
    sharded = [name for name in draft.modules if draft.degree(name, "shard") > 1]
    for name in sharded:
        choices = st.sampled_from(["always", "never"])
        draft.layout(name).update(_some(draw, fsdp_reshard_after_forward=choices))
    if sharded and sometimes(draw, 6):
        draft.table("training")["enable_cpu_offload"] = True


def precision(draw: st.DrawFn, draft: Draft) -> None:
    """fp64, so that the last digits count; now and then fp32."""
    draft.table("training")["dtype"] = "float32" if sometimes(draw, 8) else "float64"


def seeds(draw: st.DrawFn, draft: Draft) -> None:
    """The seed of weights and of the order of samples."""
    draft.table("debug")["seed"] = draw(st.integers(0, 9))


def balance(draw: st.DrawFn, draft: Draft) -> None:
    """Who handles which sample; deferral and other numbers of microbatches where the policy has them."""
    if sometimes(draw):
        return  # the default
    policy = draw(st.sampled_from(sorted(BALANCERS)))
    table = draft.table("balance")
    table["policy"] = policy
    if policy in DEFERRING and sometimes(draw, 2):
        table["deferral"] = True
    if policy != "none" and sometimes(draw):
        table["microbatches"] = "free"
    elif alone := _alone(draft):
        table["microbatch_sizes"] = {name: draw(st.integers(1, 3)) for name in alone if sometimes(draw, 2)}


def _alone(draft: Draft) -> list[str]:
    """Encoders with ranks that no other module has in that order: they go along with nobody."""
    tables = {name: t["ranks"] for name, t in draft.tables["parallelism"].items() if isinstance(t, dict)}
    encoders = set(draft.modules) - {SINK} - {boundary["to"] for boundary in draft.tables.get("boundaries", ())}
    return [name for name, ranks in tables.items() if name in encoders and list(tables.values()).count(ranks) == 1]


def bubble_fill(draw: st.DrawFn, draft: Draft) -> None:
    """Encoders on the LLM's ranks run in the gaps of the schedule that it has."""
    table = draft.table("parallelism")
    inner = table["pipeline_parallel_schedule"]
    if inner not in INNER or not any(_on_sink_ranks(draft, name) for name in draft.modules if name != SINK):
        return
    if sometimes(draw, 2):
        keys = {"bubble_fill_in_flight": st.just(16)}
        if any(_cut_by_slices(draft, name) for name in draft.modules if name != SINK):
            keys["bubble_fill_layers_per_slice"] = st.integers(1, 2)
        table |= {"pipeline_parallel_schedule": "bubble_fill", "bubble_fill_schedule": inner, **_some(draw, **keys)}


def _cut_by_slices(draft: Draft, name: str) -> bool:
    """Whether an encoder is cut where bubble_fill says: its own ranks are some of the sink's, and nothing else cuts
    it."""
    tables = draft.tables["parallelism"]
    own, flat = tables.get(name), any(key.endswith("_degree") for key in tables)
    cut = {"pipeline_parallel_layers_per_stage", "module_fqns_per_model_part"} & set(own or ())
    return name in draft.layers and (own is not None or flat) and not cut and _on_sink_ranks(draft, name)


def _on_sink_ranks(draft: Draft, name: str) -> bool:
    """Whether a module reads media on ranks that the sink has too; without ranks of its own it lies where that lies."""
    reads = all(boundary["to"] != name for boundary in draft.tables.get("boundaries", ()))
    own, sink = (draft.layout(each).get("ranks", range(draft.world)) for each in (name, SINK))
    return reads and bool(set(own) & set(sink))


def _some(draw: st.DrawFn, **keys: st.SearchStrategy[Any]) -> Table:
    """Each key with a value of its strategy, or not at all."""
    return {key: draw(values) for key, values in keys.items() if draw(st.booleans())}


PIECES: tuple[Piece, ...] = (
    schedule,
    layouts,
    stages,
    batches,
    packing,
    sequence_parallelism,
    freezing,
    dropout,
    checkpointing,
    sharding,
    precision,
    seeds,
    balance,
    bubble_fill,
)
"""In the order in which they are drawn: later ones read what earlier ones chose.

`[data] num_workers` is not drawn. The parity harness loads samples in the process that trains: a worker of a pool has
threads (process groups, the watchdog), so every loading process would come from a fork server that imports torch, some
seconds per rank and recipe on a machine with few cores, and would outlive a pool that is ended. What may go wrong with
them lies between processes and not in the layout; `tests/training/test_loading.py` compares runs with and without.
"""
