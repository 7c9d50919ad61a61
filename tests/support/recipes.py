"""A hypothesis strategy of valid small recipes over every feature of hetmesh, and which features a recipe uses.

To add a feature: one function in `recipe_pieces.PIECES` (or `recipe_graphs.GRAPHS`) that draws it, and one line in
`FEATURES` that recognises it, so that runs say how often it was tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import tomli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetmesh.balance import POLICIES as BALANCERS
from hetmesh.recipe.module_options import module_options
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.schedule.bubble_fill import INNER_SCHEDULES
from support.recipe_draft import Draft, sometimes
from support.recipe_graphs import GRAPHS
from support.recipe_pieces import OF_LAYOUT, PIECES, POLICIES, another_layout
from support.recipe_user_graphs import ITEMS, LAYERS, OWN, TILED


@dataclass(frozen=True)
class RecipeCase:
    """One drawn recipe, as its TOML text: what a failure is reported by.

    Attributes:
        text: the recipe.
        then: tables and keys with which its run goes on from a checkpoint, in another layout; empty: as it was.
    """

    text: str
    then: str = ""

    @property
    def recipe(self) -> Recipe:
        """The parsed recipe.

        Raises:
            RecipeError: hetmesh refuses it, which for a drawn recipe is a finding.
        """
        return parse_recipe(self.text)

    @property
    def resumed(self) -> Recipe:
        """The recipe with which its run goes on."""
        tables = tomli.loads(self.text)
        if self.then:
            others = tomli.loads(self.then)
            training = {k: v for k, v in tables["training"].items() if k not in OF_LAYOUT} | others.pop("training", {})
            kept = {k: v for k, v in tables.items() if k not in ("parallelism", "balance", "activation_checkpoint")}
            tables = {**kept, **others, "training": training}
        return parse_recipe(tables)

    def told(self) -> str:
        """Both, for people."""
        return self.text + (f"\n# goes on with\n\n{self.then}" if self.then else "")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the `FEATURES` that it uses."""
        recipe = self.recipe
        return tuple(name for name, has in FEATURES.items() if has(recipe))


@st.composite
def recipes(
    draw: st.DrawFn,
    world: int = 4,
    *,
    graphs: tuple[str, ...] = tuple(GRAPHS),
    experts_always: bool = False,
    runs_always: bool = False,
    gaps_always: bool = False,
    generators_always: bool = False,
) -> RecipeCase:
    """Recipes that train on at most `world` ranks in well under a second and that hetmesh documents as supported.

    Args:
        world: ranks 0 to world - 1; not every recipe uses all of them.
        graphs: names of `GRAPHS` to choose from.
        experts_always: a mixture of experts wherever the LLM can be one.
        runs_always: what only whole runs have: checkpoints, evaluations, recordings.
        gaps_always: encoders in the LLM's collectives wherever they can be.
        generators_always: modules after the LLM wherever they can be.
    """
    always = {"experts": experts_always, "runs": runs_always, "gaps": gaps_always, "generators": generators_always}
    draft = Draft(world, **always)
    GRAPHS[draw(st.sampled_from(graphs))](draw, draft)
    for piece in PIECES:
        piece(draw, draft)
    then = None
    if "checkpoint" in draft.tables and not draft.drops:
        draft.table("training").setdefault(
            "global_batch_size", draft.tables["training"]["local_batch_size"] * draft.lanes
        )
        then = None if sometimes(draw, 4) else another_layout(draw, draft)
    return RecipeCase(to_toml(draft.tables), to_toml(then) if then else "")


def draw_recipes(
    count: int, seed: int, world: int = 4, *, graphs: tuple[str, ...] = tuple(GRAPHS), feature: str | None = None
) -> list[RecipeCase]:
    """`count` different recipes, the same for the same arguments; only those with `feature`, one of `FEATURES`.

    They are drawn from random bytes, each for itself: hypothesis's own search varies what it drew before, so a hundred
    of its examples hold some features fifty times and others never.
    """
    found: dict[RecipeCase, None] = {}
    has = FEATURES[feature] if feature else None

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        recipes(
            world,
            graphs=graphs,
            experts_always="expert" in (feature or ""),
            runs_always=feature in OF_RUNS,
            gaps_always=feature == "in collectives",
            generators_always=feature in OF_OUTPUTS,
        )
    )
    def keep(case: RecipeCase) -> None:
        if len(found) < count and (has is None or has(case.recipe)):
            found.setdefault(case)

    random = Random(f"{seed}/{world}")
    while len(found) < count:
        keep.hypothesis.fuzz_one_input(random.randbytes(4096))  # type: ignore[attr-defined]
    return list(found)


def to_toml(tables: Mapping[str, Any]) -> str:
    """A recipe's tables as TOML text."""
    lines: list[str] = []
    _write(tables, "", lines)
    return "\n".join(lines).strip() + "\n"


def _write(table: Mapping[str, Any], path: str, lines: list[str]) -> None:
    lines += [f"{key} = {_value(value)}" for key, value in table.items() if not _is_tables(value)]
    for key, value in table.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            lines += ["", f"[{name}]"]
            _write(value, f"{name}.", lines)
        elif _is_tables(value):
            for each in value:
                lines += ["", f"[[{name}]]"]
                _write(each, f"{name}.", lines)


def _is_tables(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value))


def _value(value: Any) -> str:
    return json.dumps(value)  # of strings, numbers, booleans and lists of these JSON and TOML are one


def _any_mesh(axis: str) -> Callable[[Recipe], bool]:
    return lambda recipe: any(mesh.axis_size(axis) > 1 for mesh in recipe.wiring.meshes.values())


def _models(*names: str) -> Callable[[Recipe], bool]:
    return lambda recipe: any(module.model in names for module in recipe.modules.values())


def _policy(name: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.schedule == name


def _filled(inner: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.fills_bubbles and recipe.llm_schedule == inner


def _split_pipeline(recipe: Recipe) -> bool:
    return recipe.llm_schedule == "zero_bubble" and recipe.wiring.meshes[recipe.llm].axis_size("pp") > 1


def _balancer(name: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.balance.policy == name


def _key(key: str) -> Callable[[Recipe], bool]:
    return lambda recipe: bool(recipe.schedule_key(key))


def _layout_key(key: str) -> Callable[[Recipe], bool]:
    return lambda recipe: any(getattr(table, key) for table in recipe.parallelism.modules.values())


def _relation(holds: Callable[[set[int], set[int]], bool]) -> Callable[[Recipe], bool]:
    def found(recipe: Recipe) -> bool:
        meshes = recipe.wiring.meshes
        llm = set(meshes[recipe.llm].ranks)
        return any(holds(set(mesh.ranks), llm) for name, mesh in meshes.items() if name != recipe.llm)

    return found


def _uneven_lanes(recipe: Recipe) -> bool:
    lanes = [recipe.wiring.lanes(name) for name in recipe.modules]
    return any(a % recipe.lanes and recipe.lanes % a for a in lanes)


def _directory(recipe: Recipe) -> str:
    return Path(recipe.modules[recipe.llm].initial_load_path or "").name


def _prepared(recipe: Recipe) -> bool:
    return any("processor" in data.options for data in recipe.data.mixture or (recipe.data,))


def _of_kind(layers: str) -> Callable[[Recipe], bool]:
    return lambda recipe: LAYERS.get(_directory(recipe)) == layers


def _checkpoint(**values: Any) -> Callable[[Recipe], bool]:
    return lambda r: r.checkpoint.enable and all(getattr(r.checkpoint, key) == value for key, value in values.items())


OF_RUNS: Mapping[str, Callable[[Recipe], bool]] = {
    "checkpoint": _checkpoint(),
    "checkpoints beside training": _checkpoint(async_mode="async"),
    **{f"frozen {how}": _checkpoint(frozen=how) for how in ("each", "reference")},
    "last save in HF": _checkpoint(last_save_in_hf=True),
    "timeline": lambda r: r.profiling.timeline and "timeline" in r.profiling.model_fields_set,
    "held-out samples": lambda r: r.validation.samples is not None,
    "free running": lambda r: r.validation.free_running > 0,
    "Adam": lambda r: r.optimizer.name in ("AdamW", "Adam") and "lr" in r.optimizer.model_fields_set,
    "optimizers by class": lambda r: ":" in r.optimizer.name,
    "several optimizers": lambda r: bool(r.optimizer.param_groups),
    "SGD": lambda r: r.optimizer.name == "SGD",
}
"""Features of whole runs -> whether a recipe uses them."""


def _after(recipe: Recipe) -> frozenset[str]:
    return recipe.wiring.topology.after_llm


def _after_mesh(axis: str) -> Callable[[Recipe], bool]:
    return lambda recipe: any(recipe.wiring.meshes[name].axis_size(axis) > 1 for name in _after(recipe))


def _feeds_both(recipe: Recipe) -> bool:
    sources = [b.source for b in recipe.boundaries if b.destination == "drawer"]
    return any(b.source in sources and b.destination not in _after(recipe) for b in recipe.boundaries)


OF_OUTPUTS: Mapping[str, Callable[[Recipe], bool]] = {
    "modules after the LLM": lambda r: bool(_after(r)),
    "several modules after the LLM": lambda r: len(_after(r) & r.wiring.losses.keys()) > 1,
    "flow": _models("flow"),
    "regression head": lambda r: "head" in _after(r),
    "connector after the LLM": lambda r: bool(_after(r) - r.wiring.losses.keys()),
    "hidden states of a layer": lambda r: any(b.layer for b in r.boundaries),
    "ranks of its own after the LLM": lambda r: any(
        set(r.wiring.meshes[name].ranks) != set(r.wiring.meshes[r.llm].ranks) for name in _after(r)
    ),
    "stages after the LLM": _after_mesh("pp"),
    "tensor parallel after the LLM": _after_mesh("tp"),
    "FSDP after the LLM": _after_mesh("dp_shard"),
    "frozen after the LLM": lambda r: any(not r.modules[name].trainable for name in _after(r)),
    "LoRA after the LLM": lambda r: any(r.modules[name].lora is not None for name in _after(r)),
    "targets of an encoder": lambda r: "autoencoder" in r.modules,
    "targets of an encoder that the LLM reads": _feeds_both,
    "encoder with a loss": lambda r: any(name not in (r.llm, *_after(r)) for name in r.wiring.losses),
    "losses by name": lambda r: any(":" in loss.kind for loss in r.wiring.losses.values()),
    "loss of no weight": lambda r: any(loss.weight == 0 for loss in r.wiring.losses.values()),
}
"""Features of modules after the LLM, and of several losses -> whether a recipe uses them."""

FEATURES: Mapping[str, Callable[[Recipe], bool]] = {
    "identical ranks": _relation(lambda a, b: a == b),
    "disjoint ranks": _relation(lambda a, b: not a & b),
    "overlapping ranks": _relation(lambda a, b: bool(a & b) and a != b),
    "permuted ranks": lambda r: any(list(m.ranks) != sorted(m.ranks) for m in r.wiring.meshes.values()),
    "lanes that do not divide": _uneven_lanes,
    "data parallel": _any_mesh("dp_replicate"),
    "FSDP": _any_mesh("dp_shard"),
    "FSDP, whole in a step": lambda r: any(
        m.axis_size("dp_shard") > 1 and module_options(r, name).whole_in_step for name, m in r.wiring.meshes.items()
    ),
    "tensor parallel": _any_mesh("tp"),
    "shared key heads": lambda r: (
        0 < r.modules[r.llm].config.get("num_key_value_heads", 0) < r.wiring.meshes[r.llm].axis_size("tp")
    ),
    "expert parallel": _any_mesh("ep"),
    "experts that move": _layout_key("expert_placement_interval"),
    "sequence parallel": lambda r: module_options(r, r.llm).sequence_parallel,
    "sequence parallel encoder": lambda r: any(
        module_options(r, name).sequence_parallel for name in r.modules if name != r.llm
    ),
    "context parallel": _any_mesh("cp"),
    "encoder context parallel": lambda r: any(m.axis_size("cp") > 1 for n, m in r.wiring.meshes.items() if n != r.llm),
    "pipeline": _any_mesh("pp"),
    "encoder pipeline": lambda r: any(m.axis_size("pp") > 1 for n, m in r.wiring.meshes.items() if n != r.llm),
    "layers per stage": _layout_key("pipeline_parallel_layers_per_stage"),
    "layers by name": _layout_key("module_fqns_per_model_part"),
    **{policy: _policy(policy) for policy in (*POLICIES, "bubble_fill")},
    "layers per slice": _key("bubble_fill_layers_per_slice"),
    "in collectives": _key("bubble_fill_in_collectives"),
    **{f"bubble_fill over {inner}": _filled(inner) for inner in INNER_SCHEDULES},
    "split backward, sharded": lambda r: _split_pipeline(r) and r.wiring.meshes[r.llm].axis_size("dp_shard") > 1,
    "split backward, recomputed": lambda r: (
        _split_pipeline(r) and module_options(r, r.llm).activation_checkpoint != "none"
    ),
    "window": _key("three_phase_window"),
    "recompute": _key("three_phase_recompute"),
    "offload": _key("three_phase_offload"),
    "early warm-up": _key("interleaved_early_warmup"),
    "several microbatches": lambda r: r.batch.num_microbatches > 1,
    **{f"balance {policy}": _balancer(policy) for policy in sorted(BALANCERS)},
    "deferral": lambda r: r.balance.deferral is True,
    "split deferred backward": lambda r: r.balance.deferral is True and r.balance.split_deferred_backward,
    "phases": lambda r: bool(r.data.phases),
    "curriculum": lambda r: r.data.order not in ("shuffled", "given"),
    "microbatches of an encoder's own": lambda r: bool(r.balance.microbatch_sizes),
    "microbatch shares": lambda r: bool(r.balance.microbatch_shares),
    "free microbatches": lambda r: r.balance.microbatches == "free",
    "accumulation": lambda r: r.batch.global_batch_size > r.training.local_batch_size * r.lanes,
    "packing": lambda r: r.training.pack_samples,
    "isolated_media": lambda r: r.modules[r.llm].attention_mask == "isolated_media",
    "bidirectional_media": lambda r: r.modules[r.llm].attention_mask == "bidirectional_media",
    "assignment": lambda r: any(t.context_parallel_assignment for t in r.parallelism.modules.values()),
    "frozen encoder": lambda r: any(not m.trainable for n, m in r.modules.items() if n != r.llm),
    "frozen LLM": lambda r: not r.modules[r.llm].trainable,
    "frozen by name": lambda r: any(not isinstance(m.trainable, bool) for m in r.modules.values()),
    "LoRA": lambda r: any(m.lora is not None for m in r.modules.values()),
    "LoRA dropout": lambda r: any(m.lora is not None and m.lora.dropout > 0 for m in r.modules.values()),
    "hidden dropout": lambda r: any(m.config.get("dropout") for m in r.modules.values()),
    "checkpointing": lambda r: (
        r.activation_checkpoint.mode != "none"
        or any(m.activation_checkpoint not in (None, "none") for m in r.modules.values())
    ),
    "list of operations": lambda r: r.activation_checkpoint.save_ops is not None,
    "CPU offload": lambda r: r.training.enable_cpu_offload,
    "fp32": lambda r: r.training.dtype == "float32",
    "tied embeddings": lambda r: bool(r.modules[r.llm].config.get("tie_word_embeddings")),
    "text-only batches": lambda r: r.data.options.get("text_only") == 1.0,
    "several encoders": lambda r: len({b.at for b in r.boundaries if b.at}) > 1 and "second" not in r.modules,
    "two consumers": lambda r: "second" in r.modules,
    "no encoder": lambda r: len(r.modules) == 1,
    "side outputs": lambda r: any(m.config.get("deepstack_visual_indexes") for m in r.modules.values()),
    "digits": lambda r: r.data.source == "digits" and not r.data.mixture,
    "siglip": _models("siglip"),
    "clip": _models("clip"),
    "whisper": _models("whisper"),
    "qwen3": _models("qwen3"),
    "llama": _models("llama"),
    "experts": _models("qwen3_moe", "qwen3_vl_moe_text", "qwen3_5_moe_text"),
    "qwen3_vl": _models("qwen3_vl_vision"),
    "own models": lambda r: any(module.model.startswith(OWN) for module in r.modules.values()),
    "branch of training": lambda r: any(m.config.get("branch", "none") != "none" for m in r.modules.values()),
    "items of own models": _models(ITEMS),
    "FSDP of their items": lambda r: any(
        m.model == ITEMS and r.wiring.meshes[name].axis_size("dp_shard") > 1 for name, m in r.modules.items()
    ),
    "stages of a directory's tower": lambda r: (
        bool(_directory(r)) and any(m.axis_size("pp") > 1 for name, m in r.wiring.meshes.items() if name != r.llm)
    ),
    "prepared by a processor": _prepared,
    "prepared and cut": lambda r: _prepared(r) and r.training.seq_len < 500,
    "image tiles": lambda r: _directory(r) in TILED,
    **{kind: _of_kind(kind) for kind in LAYERS.values()},
    "linear_attention on shared tokens": lambda r: (
        _of_kind("linear_attention")(r)
        and (r.wiring.meshes[r.llm].axis_size("cp") > 1 or module_options(r, r.llm).sequence_parallel)
    ),
    **OF_RUNS,
    **OF_OUTPUTS,
}
"""Feature -> whether a recipe uses it."""
