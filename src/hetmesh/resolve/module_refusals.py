"""What the modules of a recipe cannot do of that which it asks of them, and users' tensor parallel plans, compared with
the whole module before it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hetmesh.errors import RecipeError, Refusals
from hetmesh.graph import NEXT_TOKEN, dense_mesh, experts_fit
from hetmesh.layout import MeshSpec
from hetmesh.models import Adapter, add_lora, build_empty, check_weights, freeze_by_name, pretrained_of
from hetmesh.models.module_shape import check_batch_statistics
from hetmesh.models.user.adapters import UserAdapter
from hetmesh.models.user.plan_probe import reason_not_compared
from hetmesh.models.weights.build import build_on_meta, reason_built_whole
from hetmesh.parallel.key_heads import KEY_HEADS, tensor_parallel_degrees, unfit_sizes
from hetmesh.parallel.tensor_parallel import check_plan
from hetmesh.recipe.batch_sizes import divisors
from hetmesh.recipe.module_options import module_options, packs, token_axes
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.sections import Module


def check_module(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    """What a module cannot do of that which the recipe asks of it: its parallelism, its weights, its adapters."""
    _tensor_parallel(recipe, name, adapter, refusals)
    _packing(recipe, name, adapter, refusals)
    if recipe.llm_schedule == "zero_bubble" and (name == recipe.llm or not recipe.fills_bubbles):
        _zero_bubble(recipe, name, refusals)
    _experts(recipe, name, adapter, refusals)
    with refusals.collect():
        if (pretrained := pretrained_of(name, recipe.modules[name])) is not None:
            check_weights(adapter, build_empty(adapter), pretrained)
        elif ":" in recipe.modules[name].model:
            reason_built_whole(adapter, name)  # which says what its constructor leaves without values
    if (module := build_on_meta(adapter)) is not None:
        _built(recipe, name, adapter, module, refusals)


def _tensor_parallel(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    mesh, sizes, plan = recipe.wiring.meshes[name], adapter.tensor_parallel_sizes(), adapter.tensor_parallel_plan()
    degree = mesh.axis_size("tp")
    if wrong := unfit_sizes(sizes, plan, degree):
        owner = recipe.wiring.tables[name]
        takes = "" if owner == name else f" (module {name!r} takes the mesh of {owner!r})"
        valid = tensor_parallel_degrees(sizes, plan)
        fitting = [d for d in valid if mesh.size % d == 0]
        multiple = KEY_HEADS in wrong and degree % wrong[KEY_HEADS] == 0
        why = adapter.abilities.because("key_heads") if multiple else ""
        kinds = [" (of its linear_attention layers)" * size.startswith("linear_") for size in wrong]
        limit = "" if fitting == valid else f", of which {fitting} divide its {mesh.size} ranks"
        refusals.add(
            f"parallelism.{owner}.tensor_parallel_degree = {degree}{takes} does not divide "
            + " and ".join(f"{size} = {value}{kind}" for (size, value), kind in zip(wrong.items(), kinds, strict=True))
            + f" of modules.{name}{why}; valid degrees are {valid}{limit}"
        )
    key = f"parallelism.{name}.enable_sequence_parallel"
    if not module_options(recipe, name).sequence_parallel:
        return
    if not (abilities := adapter.abilities.with_stages()).token_sharded:
        hint = "" if name == recipe.llm else f"; write the key in [parallelism.{recipe.llm}]"
        why = abilities.because("token_sharded")
        refusals.add(f"{key}: this {recipe.modules[name].model} cannot split its tokens{why}{hint}")


def _packing(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    """Packed samples, tokens shared between ranks, and the attention that both need."""
    degree = recipe.wiring.meshes[name].axis_size("cp")
    if packs(recipe, name):
        key = f"parallelism.{name}.context_parallel_degree = {degree}"
        if (mask := recipe.modules[name].attention_mask) != "causal":
            key = f"modules.{name}.attention_mask = {mask!r}"
        elif recipe.training.pack_samples:
            key = "training.pack_samples"
        if adapter.abilities.use_packed is None:
            refusals.add(
                f"{key}: this {recipe.modules[name].model} cannot take its samples in one row"
                f"{adapter.abilities.because('use_packed')}"
            )
        elif mask != "causal" and "attention_mask" in adapter.abilities.reasons:
            refusals.add(f"{key}: must be 'causal'{adapter.abilities.because('attention_mask')}")
        elif degree > 1 and "context_parallel" in adapter.abilities.reasons:
            refusals.add(
                f"parallelism.{name}.context_parallel_degree = {degree}: ranks cannot share the tokens of this "
                f"{recipe.modules[name].model}{adapter.abilities.because('context_parallel')}"
            )
        if dropout := adapter.abilities.attention_dropout:
            refusals.add(
                f"modules.{name}.config.attention_dropout = {dropout}: hetmesh's own attention, which {key} needs, "
                "drops nothing; set it to 0"
            )
    shares = "cp" in token_axes(recipe, name) and (name == recipe.llm or adapter.abilities.tokens_per_row)
    if degree > 1 and not shares:
        refusals.add(
            f"parallelism.{name}.context_parallel_degree = {degree}: of the modules only {recipe.llm!r}, which reads "
            "tokens, and encoders of model 'qwen3_vl_vision' can share theirs; make it 1 and give the module more data "
            "parallel ranks"
        )


def _zero_bubble(recipe: Recipe, name: str, refusals: Refusals) -> None:
    """What the stages of a pipeline cannot be combined with whose backward is split in two."""
    mesh, reshard = recipe.wiring.meshes[name], module_options(recipe, name).reshard_after_forward
    if mesh.axis_size("pp") > 1 and dense_mesh(mesh).axis_size("dp_shard") > 1 and reshard != "never":
        written = "bubble_fill_schedule" if recipe.fills_bubbles else "pipeline_parallel_schedule"
        refusals.add(
            f'parallelism.{name}.fsdp_reshard_after_forward = "{reshard}": {written} = "zero_bubble" puts off '
            'gradients of weights, which would then be gone; valid are "never" and "default", or the schedule 1f1b or '
            "interleaved"
        )


def _experts(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    """What ranks that hold different experts need of a module."""
    experts, mesh, table = adapter.abilities.experts, recipe.wiring.meshes[name], recipe.parallelism.modules.get(name)
    degree, interval = (1, 0) if table is None else (table.expert_parallel_degree, table.expert_placement_interval)
    key = f"parallelism.{name}.expert_parallel_degree = {degree}"
    if experts is None:
        # A flat [parallelism] says it of all modules; to those without experts these are lanes as all others.
        of_all = recipe.parallelism.experts_of_all
        if degree > 1 and (name == recipe.llm or degree != of_all.get("expert_parallel_degree")):
            refusals.add(
                f"{key}: this {recipe.modules[name].model} has no experts{adapter.abilities.because('experts')}"
            )
        elif interval and (name == recipe.llm or interval != of_all.get("expert_placement_interval")):
            refusals.add(
                f"parallelism.{name}.expert_placement_interval = {interval}: this {recipe.modules[name].model} has no "
                f"experts to move{adapter.abilities.because('experts')}"
            )
        return
    if interval and degree == 1:
        refusals.add(
            f"parallelism.{name}.expert_placement_interval = {interval}: every rank holds all experts, so none can "
            "move; give it an expert_parallel_degree above 1, or leave it out"
        )
    if experts.count % degree:
        refusals.add(
            f"{key}: must divide num_experts = {experts.count} of modules.{name}; {divisors(experts.count)} do"
        )
    alone = recipe.world_size == 1 and recipe.batch.global_batch_size == 1  # a sample by itself has no padding
    if not packs(recipe, name) and not alone:
        refusals.add(
            f"modules.{name}: the experts of a {recipe.modules[name].model} get no padding, so its samples must lie in "
            "one row; set training.pack_samples = true"
        )
    ep = mesh.axis_size("ep")
    if experts.count % ep == 0 and not experts_fit(mesh, experts.count, experts.inner, experts.features):
        # FSDP splits each expert where a rank would get none whole; then into equal parts.
        shards, inner = mesh.axis_size("dp_shard"), experts.inner // mesh.axis_size("tp")
        refusals.add(
            f"parallelism.{name}: {shards} ranks of data_parallel_shard_degree share {experts.count // ep} experts "
            f"(what expert_parallel_degree = {ep} leaves), and so parts of each: {shards} must divide its {inner} "
            f"inner features and hidden_size = {experts.features}"
        )


def _built(recipe: Recipe, name: str, adapter: Adapter, module: nn.Module, refusals: Refusals) -> None:
    """What a module without memory does not have: layers of a plan or for LoRA, parameters to train."""
    own = recipe.modules[name]
    with refusals.collect():
        check_batch_statistics(name, own.model, module)
    for pattern, style in own.plan.items():
        try:
            check_plan(module, {pattern: style})
        except RecipeError as error:
            refusals.add(f"modules.{name}.plan: {error}")
    if not isinstance(own.trainable, bool):
        with refusals.collect():
            freeze_by_name(module, own.trainable, f"modules.{name}.trainable")
    encoder, parameters = not recipe.wiring.topology.inputs(name) and name != recipe.llm, [*module.parameters()]
    frozen = not any(p.requires_grad for p in parameters)  # the graph would send gradients back for nothing
    if own.trainable and own.lora is None and frozen and (encoder or parameters):
        given, remedy = "true", "let the class leave something to train"
        if not isinstance(own.trainable, bool):
            given, remedy = f"{list(own.trainable)}", "choose something to train"
        refusals.add(
            f"modules.{name}.trainable = {given}, but {type(module).__name__} has no parameter with requires_grad = "
            f"True: write trainable = false in [modules.{name}], or {remedy}"
        )
    if own.lora is not None:
        with refusals.collect(), torch.device("meta"):
            add_lora(module, own.lora, name, recipe.debug.seed, adapter.layers())


def untrained(recipe: Recipe) -> list[str]:
    """What is to be said of modules that only losses of weight 0 reach: an optimizer changes them all the same."""
    wiring = recipe.wiring
    losses = {wiring.llm: NEXT_TOKEN} | dict(wiring.losses)
    reached = {name for name, loss in losses.items() if loss.weight}
    reached = reached.union(*map(wiring.topology.upstream, reached))
    return [
        f"modules.{name}: no loss of a weight above 0 trains it; trainable = false keeps weight decay from it, too"
        for name, module in recipe.modules.items()
        if name not in reached and module.trainable
    ]


_compared: dict[Any, str | None] = {}
"""What was compared in this process, as several commands and the job ask again -> why it could not be."""


def uncompared_plans(
    modules: Mapping[str, Module], meshes: Mapping[str, MeshSpec], adapters: Mapping[str, Adapter], vocab_size: int
) -> list[str]:
    """Compare modules whose plan is a user's with themselves on tensor parallel ranks. Returns what could not be
    compared or tried, and why, a sentence each. Raises RecipeError: one computes something else, a line each."""
    notes, refusals = list[str](), Refusals()
    for name, adapter in adapters.items():
        if isinstance(adapter, UserAdapter) and adapter.reason_not_probed:
            notes.append(f"modules.{name}: whether it mixes samples was not tried: {adapter.reason_not_probed}")
        if adapter.abilities.gathered_whole and meshes[name].axis_size("fsdp") > 1:
            notes.append(f"modules.{name}: FSDP gathers it whole: not every call is known to enter each layer once")
        degree, added = meshes[name].axis_size("tp"), modules[name].plan
        plan = {**adapter.tensor_parallel_plan(), **added}
        if degree == 1 or not plan or (":" not in modules[name].model and not added):
            continue
        where = f"modules.{name}.plan" if added else f"modules.{name}: its tensor_parallel_plan"
        key = (repr(adapter), repr(plan), degree, vocab_size)
        with refusals.collect():
            if key not in _compared:
                _compared[key] = reason_not_compared(adapter, plan, degree, vocab_size, where)
            if _compared[key] is not None:
                notes.append(f"{where} was not compared with the whole module: {_compared[key]}")
    refusals.finish()
    return notes
