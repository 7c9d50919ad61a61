"""The configurations: one small VLM on two ranks, laid out and scheduled in different ways."""

from __future__ import annotations

from dataclasses import dataclass

from hetmesh.recipe.recipe import Recipe, parse_recipe

_MODEL = """
[modules.vision]
model = "siglip"
trainable = {vision_trainable}
[modules.vision.config]
hidden_size = {width}
num_hidden_layers = {vision_layers}
num_attention_heads = 4
intermediate_size = {wide}
patch_size = 4
image_size = 32
num_channels = 1

[modules.projector]
model = "mlp"

[modules.llm]
model = "qwen3"
trainable = {llm_trainable}
[modules.llm.config]
hidden_size = {width}
num_hidden_layers = {llm_layers}
num_attention_heads = 4
num_key_value_heads = 4
head_dim = {head}
intermediate_size = {inner}
tie_word_embeddings = false

[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"

{drawer}
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = {{ {kinds} }}
items = 1
max_text = {text}

[training]
local_batch_size = {batch}
pack_samples = {packed}
steps = 1000000

[checkpoint]
enable = false

[parallelism]
pipeline_parallel_schedule = "{policy}"
pipeline_parallel_microbatch_size = {microbatch}
{tables}
"""

_DRAWER = """
[modules.drawer]
model = "flow"
[modules.drawer.config]
queries = 8
hidden_size = {width}
num_hidden_layers = {vision_layers}
num_attention_heads = 4
patch_size = 4
[modules.drawer.loss]
kind = "flow_matching"
[[boundaries]]
from = "llm"
to = "drawer"
at = "drawing"
"""

_ON_RANK_0 = "[parallelism.vision]\nranks = [0]\n"
_PIPELINE = "[parallelism.llm]\nranks = [0, 1]\npipeline_parallel_degree = 2\n"
_BOTH = "[parallelism.{}]\nranks = [0, 1]\ndata_parallel_replicate_degree = 2\n"
_CONTEXT = "[parallelism.llm]\nranks = [0, 1]\ncontext_parallel_degree = 2\n"
_SPREAD = _BOTH.format("vision") + _BOTH.format("projector")
SPREAD_PIPELINE = _SPREAD + _PIPELINE
"""Encoder and projector data parallel on the ranks of a pipeline of two stages."""


@dataclass(frozen=True)
class Configuration:
    """One layout and schedule of the model; samples are an image of 64 rows and 2 to `text` tokens.

    Attributes:
        vision_wide: the inner width of the encoder's MLPs, in widths.
        packed: the samples of a lane of the LLM lie in one row.
        draws: a flow-matching transformer as deep as the encoder makes an image of each sample, too.
    """

    name: str
    policy: str
    tables: str
    vision_layers: int = 1
    vision_trainable: bool = True
    llm_trainable: bool = True
    text: int = 25
    vision_wide: int = 4
    packed: bool = False
    draws: bool = False

    def recipe(
        self, *, width: int, llm_layers: int, microbatch: int, microbatches: int, vision_layers: int | None = None
    ) -> Recipe:
        """The recipe; the encoder's depth grows with the LLM's unless it is given."""
        depth = vision_layers or max(self.vision_layers * llm_layers // 4, 1)
        kinds = ["image = [1, 32, 32]", *["drawing = [1, 32, 32]"] * self.draws]
        text = _MODEL.format(
            kinds=", ".join(kinds),
            drawer=_DRAWER.format(width=width, vision_layers=depth) if self.draws else "",
            vision_trainable=str(self.vision_trainable).lower(),
            llm_trainable=str(self.llm_trainable).lower(),
            width=width,
            wide=self.vision_wide * width,
            inner=width * 11 // 4,
            head=width // 4,
            vision_layers=depth,
            llm_layers=llm_layers,
            text=self.text,
            packed=str(self.packed).lower(),
            batch=microbatch * microbatches,
            microbatch=microbatch,
            policy=self.policy,
            tables=self.tables,
        )
        return parse_recipe(text)


CONFIGURATIONS = (
    Configuration("1f1b", "1f1b", _ON_RANK_0 + _PIPELINE),
    Configuration("interleaved", "interleaved", _ON_RANK_0 + _PIPELINE),
    Configuration("zero_bubble", "zero_bubble", _ON_RANK_0 + _PIPELINE),
    Configuration("three_phase", "three_phase", SPREAD_PIPELINE, vision_layers=2),
    Configuration("frozen", "1f1b", _ON_RANK_0 + _PIPELINE, 4, vision_trainable=False),
    Configuration("disjoint encoder", "1f1b", _ON_RANK_0 + "[parallelism.llm]\nranks = [1]\n", vision_layers=4),
    Configuration("packed pipeline", "1f1b", _ON_RANK_0 + _PIPELINE, packed=True, text=120),
    Configuration("packed context", "1f1b", _SPREAD + _CONTEXT, packed=True, text=120),
)
"""`frozen`: the encoder has no backward. Where nothing is said of the projector it lives with the LLM's first stage."""
