"""Static memory equals what ranks really hold: shards of FSDP, of tensor parallelism, of both, with frozen parts."""

from pathlib import Path

import pytest

from hetmesh.boundary import World
from hetmesh.cost import static_memory
from hetmesh.parallel import local_part
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.job import Job
from support.often import some

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
SHARDED = (
    *("--parallelism.vision.ranks", "0-2", "--parallelism.vision.data_parallel_replicate_degree", "1"),
    *("--parallelism.vision.data_parallel_shard_degree", "3", "--parallelism.llm.ranks", "0-3"),
    *("--parallelism.llm.data_parallel_replicate_degree", "1", "--parallelism.llm.data_parallel_shard_degree", "2"),
    *("--parallelism.llm.tensor_parallel_degree", "2", "--training.local_batch_size", "4"),
)
LORA = ("--modules.llm.lora.rank", "3", "--modules.vision.trainable", "false")


def held(rank, recipe):
    """Per module of this rank: elements of all its parameters, and of the trainable ones."""
    job = Job.assemble(resolve(recipe), World.current())
    return {
        name: tuple(
            sum(local_part(p).numel() for p in module.parameters() if p.requires_grad or not trainable)
            for trainable in (False, True)
        )
        for name, module in job.root.named_children()
    }


MOE = (
    *("--parallelism.vision.ranks", "0-1", "--parallelism.llm.ranks", "0-3", "--training.local_batch_size", "4"),
    *("--parallelism.llm.expert_parallel_degree", "2"),
)
ONE = ("--parallelism.llm.data_parallel_replicate_degree", "1")
EXPERTS = {
    "EP 2": (*MOE, "--parallelism.llm.data_parallel_replicate_degree", "4"),
    "EP 2 x TP 2": (*MOE, "--parallelism.llm.tensor_parallel_degree", "2"),
    "FSDP 2 x EP 2": (*MOE, *ONE, "--parallelism.llm.data_parallel_shard_degree", "4"),
    "FSDP within experts": (
        *(*MOE, *ONE, "--parallelism.llm.data_parallel_shard_degree", "4", "--modules.llm.config.num_experts", "2"),
    ),
    "EP 2 out of FSDP 2, TP 2": (
        *(*MOE, *ONE, "--parallelism.llm.data_parallel_shard_degree", "2"),
        *("--parallelism.llm.tensor_parallel_degree", "2"),
    ),
    "FSDP 4": (
        *(*MOE, *ONE, "--parallelism.llm.data_parallel_shard_degree", "4"),
        *("--parallelism.llm.expert_parallel_degree", "1"),
    ),
}


@pytest.mark.parametrize(
    "overrides",
    [pytest.param((), marks=pytest.mark.exhaustive), SHARDED, (*SHARDED, *LORA)],
    ids=["plain", "sharded", "lora"],
)
def test_every_rank_holds_what_was_computed(pool4, overrides):
    compare(pool4, load_recipe(RECIPES / "digits_overlapping.toml", overrides))


@pytest.mark.parametrize("case", some(("EP 2 x TP 2", "FSDP within experts", "EP 2 out of FSDP 2, TP 2"), EXPERTS))
def test_every_rank_holds_its_experts(pool4, case):
    compare(pool4, load_recipe(RECIPES / "digits_moe.toml", EXPERTS[case]))


def compare(pool4, recipe):
    """What was computed, and what the ranks of `pool4` hold."""
    resolved = resolve(recipe)
    shapes = resolved.shapes
    expected = [{} for _ in range(4)]
    for name, shape in shapes.items():
        for rank, memory in static_memory(shape, resolved.graph[name].mesh, 1, "SGD").items():
            expected[rank][name] = (memory.elements, memory.gradients)
    assert pool4.run(held, recipe, timeout=120) == expected
