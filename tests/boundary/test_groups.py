"""Process groups: no more than axes, edges and tied weights need, and those that a run makes are those foretold."""

from pathlib import Path

import pytest

from hetmesh.boundary import World
from hetmesh.boundary.process_groups import (
    CONTEXT,
    ends_are_tied,
    job_channels,
    job_groups,
    mesh_groups,
    most_on_a_rank,
    tied_pairs,
)
from hetmesh.boundary.transport import MEMORY
from hetmesh.graph import stage_graph
from hetmesh.recipe.recipe import load_recipe
from hetmesh.report import as_text, explain
from hetmesh.resolve.resolved import resolve
from hetmesh.training.job import Job

RECIPES = Path(__file__).parents[2] / "recipes"
LARGE = (
    *("--parallelism.vision.ranks", "all", "--parallelism.vision.data_parallel_replicate_degree", "256"),
    *("--parallelism.llm.ranks", "all", "--parallelism.llm.pipeline_parallel_degree", "2"),
    *("--parallelism.llm.data_parallel_replicate_degree", "64", "--parallelism.llm.tensor_parallel_degree", "2"),
    *("--training.local_batch_size", "4"),
)


def foretold(recipe, link="gloo"):
    resolved = resolve(recipe)
    graph = resolved.graph
    shapes = resolved.shapes
    return (
        graph,
        shapes,
        job_groups(graph, recipe.world_size, lambda spec: ends_are_tied(spec, shapes[spec.name]), link),
    )


def test_256_ranks_have_the_groups_of_their_axes_and_no_more():
    """Edges join more ranks than an all-to-all is good for, and the ends of the LLM are tied: one pair per shard."""
    recipe = load_recipe(RECIPES / "digits_colocated.toml", LARGE)
    assert recipe.world_size == 256
    graph, shapes, groups = foretold(recipe)
    axes = {ranks for name in graph.order for i in range(2) for ranks in mesh_groups(graph[name].stage_mesh(i))}
    pairs = set(tied_pairs(graph["llm"])) if ends_are_tied(graph["llm"], shapes["llm"]) else set()
    assert set(groups) == {ranks for ranks in axes | pairs | {tuple(range(256))} if len(ranks) > 1}
    assert len(groups) == len(set(groups))
    # llm: 2 stages x (64 pairs along tp + 2 x 64 along dp); vision 256 along dp, which is all ranks
    assert len(axes | {tuple(range(256))}) == 2 * (64 + 2) + 1
    assert len(stage_graph(graph).edges) > 2
    assert most_on_a_rank(groups) == 2 + 1 + bool(pairs)


def test_weights_that_are_not_tied_need_no_pairs():
    recipe = load_recipe(
        RECIPES / "digits_colocated.toml", (*LARGE, "--modules.llm.config.tie_word_embeddings", "false")
    )
    tied = load_recipe(RECIPES / "digits_colocated.toml", (*LARGE, "--modules.llm.config.tie_word_embeddings", "true"))
    assert len(foretold(tied)[2]) - len(foretold(recipe)[2]) == 128


def test_explain_shows_the_count():
    view = explain(resolve(load_recipe(RECIPES / "digits.toml")))
    # vision dp, llm tp (and projector), all ranks; and on NCCL the channels of two edges, of ranks 0-3 and 2-3
    assert (view.process_groups, view.process_groups_per_rank) == (5, 4)
    assert "5 process groups, at most 4 on one rank" in as_text(view)


def channels(name, overrides=(), **limits):
    graph = resolve(load_recipe(RECIPES / f"{name}.toml", overrides)).graph
    return graph, stage_graph(graph), job_channels(graph, **limits)


def test_every_edge_and_context_parallel_group_has_a_channel_of_its_own():
    graph, stages, found = channels("digits_cp_pp")
    assert set(found.of_edge) == {
        e for e in stages.edges if len({*stages.ranks_of(e.source), *stages.ranks_of(e.destination)}) > 1
    }
    assert len(set(found.of_edge.values())) == len(found.of_edge)
    context = [channel.ranks for channel in found.all if channel.purpose == CONTEXT]
    meshes = [graph["llm"].stage_mesh(i) for i in range(2)]
    assert context == list(dict.fromkeys(ranks for mesh in meshes for ranks in mesh.axis_groups("cp")))
    assert len(found.all) == len(found.of_edge) + len(context)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_channels_of_a_rank_are_bounded(most):
    """With many stages on the same ranks edges share: each of them evenly, and only with edges of the same ranks."""
    more = ("--parallelism.llm.pipeline_parallel_layers_per_stage", "1", "--modules.llm.config.num_hidden_layers", "12")
    _, stages, found = channels("digits_interleaved", more, most=most)
    assert len(stages.edges) > 8
    assert most_on_a_rank(tuple(channel.ranks for channel in found.all)) <= most
    loads: dict[tuple, list[int]] = {}
    for channel in found.all:
        loads.setdefault(channel.ranks, []).append(sum(each == channel for each in found.of_edge.values()))
    assert all(max(counts) - min(counts) <= 1 for counts in loads.values())
    assert all(set(c.ranks) >= {*stages.ranks_of(e.source)} for e, c in found.of_edge.items())


def made(rank, names, shared_memory):
    world, seen = World.current(), []
    world.connect()
    local_peers, world.local_peers = world.local_peers, world.local_peers if shared_memory else None
    for name, overrides in names:
        world._groups.clear()
        world._meshes.clear()
        recipe = load_recipe(RECIPES / f"{name}.toml", overrides)
        Job.assemble(resolve(recipe), world)
        seen.append({ranks for ranks in world._groups if len(ranks) > 1})
    world.local_peers = local_peers
    return seen


PIPELINE = ("--parallelism.llm.pipeline_parallel_degree", "2", "--parallelism.llm.tensor_parallel_degree", "1")
JOBS = [("digits", ()), ("digits_colocated", ()), ("digits", PIPELINE)]


@pytest.mark.slow
@pytest.mark.parametrize(("shared_memory", "link"), [(False, "gloo"), (True, MEMORY)])
def test_a_run_makes_the_groups_that_were_foretold(pool4, shared_memory, link):
    """None for edges where all ranks share memory."""
    for job, seen in enumerate(zip(*pool4.run(made, JOBS, shared_memory), strict=True)):
        name, overrides = JOBS[job]
        groups = set(foretold(load_recipe(RECIPES / f"{name}.toml", overrides), link)[2])
        everyone = {tuple(range(4))}  # made by the first step
        assert all(ranks | everyone == groups for ranks in seen), name
