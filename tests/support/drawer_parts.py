"""An LLM and ready-made modules after it, as the parts of recipes."""

from __future__ import annotations

from hetmesh.recipe.recipe import Recipe, parse_recipe

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
BRIDGE = (
    DIFFUSERS.replace('to = "drawer"\nat', 'to = "bridge"\nat')
    + """
[modules.bridge]
model = "mlp"
[[boundaries]]
from = "bridge"
to = "drawer"
"""
)
"""`DIFFUSERS` with a projector between the LLM and the drawer."""
OWN = """
[modules.head]
model = "support.user_generators:{kind}"
config = {{ queries = 2 }}
loss = {{ kind = "{loss}", unit = "frames", weight = 0.3 }}
[[boundaries]]
from = "llm"
to = "head"
at = "image_out"
"""


def case(*parts: str) -> Recipe:
    return parse_recipe("\n".join([LLM, *parts]))
