"""What ranks that hold different experts cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetmesh.errors import Refusals
from hetmesh.graph import experts_fit
from hetmesh.models import Adapter
from hetmesh.parallel.experts import ExpertLayers
from hetmesh.recipe.batch_sizes import divisors
from hetmesh.recipe.module_options import packs

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe


def check_experts(recipe: Recipe, name: str, adapter: Adapter, refusals: Refusals) -> None:
    """What ranks that hold different experts need of a module."""
    experts, degree = adapter.abilities.experts, _degree(recipe, name)
    key = f"parallelism.{name}.expert_parallel_degree = {degree}"
    interval = _interval(recipe, name)
    if experts is None:
        # A flat [parallelism] says it of all modules; to those without experts these are lanes as all others.
        of_all = recipe.parallelism.experts_of_all
        if degree > 1 and (name == recipe.sink or degree != of_all.get("expert_parallel_degree")):
            refusals.add(
                f"{key}: this {recipe.modules[name].model} has no experts{adapter.abilities.because('experts')}"
            )
        elif interval and (name == recipe.sink or interval != of_all.get("expert_placement_interval")):
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
    _experts_within(recipe, name, experts, refusals)


def _experts_within(recipe: Recipe, name: str, experts: ExpertLayers, refusals: Refusals) -> None:
    """FSDP splits each expert where a rank would get none whole; then into equal parts."""
    mesh = recipe.wiring.meshes[name]
    if experts.count % mesh.axis_size("ep") == 0 and not experts_fit(
        mesh, experts.count, experts.inner, experts.features
    ):
        shards, each = mesh.axis_size("dp_shard"), experts.count // mesh.axis_size("ep")
        inner = experts.inner // mesh.axis_size("tp")
        refusals.add(
            f"parallelism.{name}: {shards} ranks of data_parallel_shard_degree share {each} experts (what "
            f"expert_parallel_degree = {mesh.axis_size('ep')} leaves), and so parts of each: {shards} must divide its "
            f"{inner} inner features and hidden_size = {experts.features}"
        )


def _interval(recipe: Recipe, name: str) -> int:
    own = recipe.parallelism.modules.get(name)
    return 0 if own is None else own.expert_placement_interval


def _degree(recipe: Recipe, name: str) -> int:
    own = recipe.parallelism.modules.get(name)
    return 1 if own is None else own.expert_parallel_degree
