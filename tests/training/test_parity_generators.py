"""Modules after the LLM as ready-made models: every layout gives the losses and gradients of one process."""

import pytest

from hetmesh.boundary import World
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.testing import parity
from support import tiny_diffusers
from support.parity_cases import table

LLM = """
[modules.llm]
model = "qwen3"
config = { hidden_size = 8, num_hidden_layers = 2, num_attention_heads = 2, head_dim = 4, intermediate_size = 14 }
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = { image_out = [1, 8, 8] }
[training]
local_batch_size = 4
dtype = "float64"
[parallelism]
pipeline_parallel_schedule = "1f1b"
pipeline_parallel_microbatch_size = 1
"""
FLOW = """
[modules.drawer]
model = "flow"
[modules.drawer.config]
queries = 3
hidden_size = 8
num_hidden_layers = 2
num_attention_heads = 2
patch_size = 4
[modules.drawer.loss]
kind = "flow_matching"
weight = 0.7
[[boundaries]]
from = "llm"
to = "drawer"
at = "image_out"
"""
HEAD = """
[modules.head]
model = "mlp"
config = { out_features = 8, hidden_features = 6 }
loss = { kind = "mse" }
[[boundaries]]
from = "llm"
to = "head"
at = "image_out"
"""
DIFFUSERS = """
[modules.vae]
model = "diffusers_vae"
initial_load_path = "{folder}/{vae}"
trainable = false
[modules.drawer]
model = "diffusers"
config = {{ queries = 3 }}
initial_load_path = "{folder}/{drawer}"
loss = {{ kind = "flow_matching" }}
[[boundaries]]
from = "llm"
to = "drawer"
at = "image_out"
[[boundaries]]
from = "vae"
to = "drawer"
"""


def case(*parts):
    return parse_recipe("\n".join([LLM, *parts]))


CASES = {
    "flow, apart": case(FLOW, table("llm", "0"), table("drawer", "1")),
    "flow, colocated, FSDP 2": case(FLOW, table("llm", "0-1", tp=2), table("drawer", "0-1", fsdp=2)),
    "flow, TP 2": case(FLOW, table("llm", "0-1"), table("drawer", "0-1", tp=2)),
    "flow, PP 2": case(FLOW, table("llm", "0-1", tp=2), table("drawer", "0-1", pp=2)),
    "regression head, TP 2": case(HEAD, table("llm", "0"), table("head", "0-1", tp=2)),
    "both": case(
        FLOW.replace("queries = 3", "queries = 8"), HEAD, table("llm", "0"), table("drawer", "1"), table("head", "0-1")
    ),
}


def run(rank, recipe):
    return parity.run(recipe, World.current())


def judged(pool, recipe):
    expected = parity.reference(recipe)
    assert expected.of_modules[0].keys() > {"llm"}
    return parity.compare(expected, pool(2).run(run, recipe, timeout=120), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layouts_of_ready_made_generators(pool, name):
    assert judged(pool, CASES[name]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("drawer", sorted(tiny_diffusers.TRANSFORMERS))
def test_layouts_of_diffusers_transformers_with_a_frozen_autoencoder(pool, drawer, tmp_path):
    pytest.importorskip("diffusers")
    vae = "AutoencoderDC" if "Sana" in drawer else "AutoencoderKL"
    tiny_diffusers.save(drawer, tmp_path)
    tiny_diffusers.save(vae, tmp_path)
    model = DIFFUSERS.format(folder=tmp_path, vae=vae, drawer=drawer)
    for tables in (
        (table("llm", "0"), table("drawer", "1"), table("vae", "0-1")),
        (table("llm", "0-1", tp=2), table("drawer", "0-1", fsdp=2), table("vae", "0-1")),
    ):
        assert judged(pool, case(model, *tables)) < 1e-10
