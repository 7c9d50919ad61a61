"""Modules after the LLM, and several losses: each loss, the total, gradients and parameters of one plain process."""

import pytest

from hetmesh.boundary import World
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.testing.parity import compare, reference, run

READER = """
[modules.vision]
model = "siglip"
config = { hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2, patch_size = 4, intermediate_size = 12 }
[modules.projector]
model = "mlp"
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
"""
LLM = """
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = 16
num_hidden_layers = 3
num_attention_heads = 4
head_dim = 4
intermediate_size = 20
"""
DRAWER = """
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
at = "drawing"
"""
POSE = """
[modules.pose]
model = "mlp"
config = { out_features = 3, hidden_features = 6 }
[modules.pose.loss]
kind = "mse"
unit = "frames"
weight = 0.3
[[boundaries]]
from = "llm"
to = "pose"
at = "pose"
layer = "model.layers.1"
"""
DATA = """
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
text_only = 0.3
without_targets = 0.2
kinds = { image = [1, 8, 8], drawing = [1, 8, 8], pose = [2, 3] }
[training]
dtype = "float64"
local_batch_size = 4
"""
DRAWS = READER + LLM + DRAWER + DATA.replace(", pose = [2, 3]", "")
BOTH = READER + LLM + DRAWER + POSE + DATA
STEPS = 3


def layout(**tables):
    """The tables of `[parallelism]`: `llm=dict(ranks=[0, 1], tp=2)`."""
    keys = {"tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree"}
    keys |= {"fsdp": "data_parallel_shard_degree", "sp": "enable_sequence_parallel"}
    keys |= {"schedule": "pipeline_parallel_schedule", "size": "pipeline_parallel_microbatch_size"}
    lines = []
    for name, table in tables.items():
        lines.append(f"[parallelism.{name}]")
        values = {keys.get(key, key): value for key, value in table.items()}
        lines += [f"{key} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for key, v in values.items()]
    return "\n".join(["", *lines, ""])


def on_this_rank(rank, recipe, fault=None):
    return run(recipe, World.current(), steps=STEPS, fault=fault)


def check(pool, text, *overrides):
    recipe = parse_recipe(text, overrides)
    ranks = pool.run(on_this_rank, recipe, timeout=120)
    return compare(reference(recipe, STEPS), ranks, 1e-10)


SCHEDULES = ("1F1B", "Interleaved1F1B", "zero_bubble", "three_phase", "bubble_fill")
CASES = {
    "all on one rank": (DRAWS, layout(llm={"ranks": [0], "size": 2})),
    "generator without a table": (DRAWS, layout(llm={"ranks": [0, 1], "tp": 2, "size": 2})),
    "other ranks": (DRAWS, layout(llm={"ranks": [0, 1], "tp": 2, "size": 2}, drawer={"ranks": [2, 3]})),
    "overlapping ranks": (
        BOTH,
        layout(llm={"ranks": [0, 1, 2], "size": 1}, drawer={"ranks": [1, 3]}, pose={"ranks": [2, 1, 3]}),
    ),
    "colocated, other degrees": (
        BOTH,
        layout(llm={"ranks": [0, 1, 2, 3], "tp": 2, "sp": True, "size": 2}, drawer={"ranks": [0, 1, 2, 3]}),
    ),
    "context parallel, packed": (
        BOTH,
        layout(
            llm={"ranks": [0, 1], "cp": 2, "size": 2},
            drawer={"ranks": [3, 1], "fsdp": 2},
            pose={
                "ranks": [2],
            },
        ),
    ),
    "generator tensor parallel": (DRAWS, layout(llm={"ranks": [0, 1], "size": 2}, drawer={"ranks": [2, 3], "tp": 2})),
    "generator in stages": (
        DRAWS,
        layout(llm={"ranks": [0, 1], "size": 1, "schedule": "1F1B"}, drawer={"ranks": [2, 3], "pp": 2}),
    ),
    **{
        f"pipeline, {schedule}": (
            BOTH,
            layout(
                vision={"ranks": [0, 1]},
                llm={"ranks": [0, 1], "pp": 2, "size": 1, "schedule": schedule},
                drawer={"ranks": [0, 1]},
                pose={"ranks": [2, 3]},
            ),
        )
        for schedule in SCHEDULES
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_modules_after_the_llm_equal_one_process(pool4, case):
    check(pool4, "".join(CASES[case]))
