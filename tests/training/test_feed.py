"""The feed: each rank loads what its modules read of the samples of its lanes, and nothing else."""

from pathlib import Path

import pytest

from hetmesh.balance import plan_batch
from hetmesh.data import Loader
from hetmesh.data.digits import DigitsSource
from hetmesh.graph import Stage
from hetmesh.models.draws import FIRST
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.feed import Feed

RECIPES = Path(__file__).parents[2] / "recipes"


class Watched(DigitsSource):
    """Notes what it is asked for, and says that a token takes 1 byte and a pixel 4."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = {}

    def load(self, index, kinds=None):
        assert index not in self.asked, "a sample is loaded once per rank and step"
        self.asked[index] = set(kinds)
        sample = super().load(index, kinds)
        pixels = sum(image.numel() for image in sample.media.get("image", ()))
        size = len(sample.tokens) + 4 * pixels
        return type(sample)(sample.id, sample.tokens, sample.media, size, size)


def feed_all(name, *overrides):
    """Per rank: what its source was asked for, and what its feed loaded, once everything has asked for its batch."""
    recipe = load_recipe(RECIPES / name, ("--training.local_batch_size", "4", *overrides))
    resolved = resolve(recipe)
    graph = resolved.graph
    found = {}
    for rank in graph.ranks:
        source = Watched()
        loader = Loader(source, recipe.batch.global_batch_size, resolved.expander)
        drawn = next(loader)
        plan = plan_batch(graph, [d.meta for d in drawn], recipe.batch.microbatch_size)
        feed = Feed(loader, drawn, plan, resolved.adapters, rank, FIRST)
        for module in graph.order:
            for stage in range(graph[module].num_stages):
                if rank in graph[module].stage_mesh(stage):
                    for m in range(len(plan.lanes[module])):
                        feed(Stage(module, stage), m)
        found[rank] = source.asked, feed.loaded, drawn
    return graph, found


def test_u21_ranks_without_an_encoder_load_no_pixels_and_encoder_ranks_no_other_lanes_images():
    graph, found = feed_all("digits.toml")
    encoders, llm = set(graph["vision"].mesh.ranks), set(graph["llm"].mesh.ranks)
    assert not encoders & llm
    for rank in llm:
        asked, loaded, drawn = found[rank]
        assert set(asked) == {d.index for d in drawn}  # one lane
        assert not any(asked.values())
        assert loaded.bytes_needed == sum(d.given.tokens for d in drawn)
    shares = [found[rank][0] for rank in sorted(encoders)]
    assert all(kinds == {"image"} for asked in shares for kinds in asked.values())
    lanes = [set(asked) for asked in shares]
    assert sum(map(len, lanes)) == len(set.union(*lanes)) == len(found[0][2])


def test_u21_where_modules_share_a_rank_it_loads_each_sample_once_with_what_any_of_them_reads():
    graph, found = feed_all("digits_colocated.toml")
    for rank in graph.ranks:
        asked, loaded, _ = found[rank]
        lane = [graph[name].lane_of(rank) for name in ("vision", "llm")]
        assert None not in lane
        assert {"image"} in asked.values()
        assert loaded.bytes_read == loaded.bytes_needed > 0
        assert loaded.load_s > 0


@pytest.mark.parametrize("degree", ["2"])
def test_u21_later_stages_of_an_encoder_load_nothing(degree):
    keys = ("--parallelism.vision.pipeline_parallel_degree", degree)
    keys += ("--parallelism.vision.data_parallel_replicate_degree", "1")
    graph, found = feed_all("digits.toml", *keys)
    first, last = (graph["vision"].stage_mesh(i).ranks[0] for i in (0, -1))
    assert found[first][0]
    assert not found[last][0]
