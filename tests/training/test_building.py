"""Building the modules of a rank: the same weights in any layout, and no more memory than what the rank keeps."""

import pytest
import torch

from hetmesh.boundary import World
from hetmesh.parallel import local_part
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime import LiveBytes
from hetmesh.testing.parity import reference, run_as
from hetmesh.training.job import Job
from support.often import some

pytestmark = pytest.mark.slow

MODEL = """
[modules.vision]
model = "siglip"
config = { hidden_size = 12, num_hidden_layers = 2, num_attention_heads = 2, patch_size = 4, image_size = 8 }
[modules.projector]
model = "mlp"
config = { hidden_features = 7 }
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = 10
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 6
intermediate_size = 18
tie_word_embeddings = true
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[data]
source = "hetmesh.testing.sources:RandomMedia"
options = { kinds = { image = [1, 8, 8] } }
[training]
local_batch_size = 4
"""
LAYOUTS = {
    "replicas": "data_parallel_replicate_degree = 4",
    "uneven rows": "data_parallel_shard_degree = 4",
    "tensor parallel": "data_parallel_replicate_degree = 2\ntensor_parallel_degree = 2",
    "rows of tensor parallel": "data_parallel_shard_degree = 2\ntensor_parallel_degree = 2",
    "stages": "pipeline_parallel_degree = 2\ndata_parallel_shard_degree = 2\npipeline_parallel_microbatch_size = 2",
}


@pytest.mark.parametrize("kind", some(("uneven rows", "rows of tensor parallel", "stages"), LAYOUTS))
def test_every_layout_begins_with_the_weights_of_one_process(pool, kind):
    vision = LAYOUTS[kind] if "pipeline" not in LAYOUTS[kind] else LAYOUTS["uneven rows"]
    lora = "\n[modules.vision.lora]\nrank = 2" if kind != "stages" else ""
    tables = f'[parallelism.vision]\nranks = "0-3"\n{vision}\n[parallelism.llm]\nranks = "0-3"\n{LAYOUTS[kind]}'
    recipe = parse_recipe(f"{MODEL}{lora}\n{tables}")
    expected = reference(recipe, 0).parameters
    held = set()
    for outcome in pool(4).run(run_as, recipe, 0):
        held |= outcome.parameters.keys()
        assert all(torch.equal(value, expected[name]) for name, value in outcome.parameters.items())
    assert held == expected.keys()


LARGE = MODEL.replace("hidden_size = 10", "hidden_size = 512").replace(
    "intermediate_size = 18", "intermediate_size = 6144"
)


def peak_over_shard(rank, recipe):
    """Peak while the modules of this rank are built, over what they keep."""
    with LiveBytes() as live:
        job = Job.assemble(resolve(recipe), World.current())
        kept = sum(local_part(t).nbytes for t in (*job.root.parameters(), *job.root.buffers()))
        return live.peak / kept, kept


@pytest.mark.parametrize("kind", ["uneven rows", "rows of tensor parallel"])
def test_building_takes_little_more_memory_than_what_a_rank_keeps(pool, kind):
    recipe = parse_recipe(f'{LARGE}\n[parallelism]\nranks = "0-3"\n{LAYOUTS[kind]}')
    for ratio, kept in pool(4).run(peak_over_shard, recipe):
        assert 8e6 < kept < 25e6
        assert ratio <= 1.2
