"""The problems: small models on two to four ranks of two cores, and what their layouts keep to, so that all can run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hetmesh.recipe.recipe import parse_recipe
from hetmesh.training.tune.tuner import Asked

_VISION = """
[modules.vision]
model = "siglip"
trainable = {trainable}
[modules.vision.config]
hidden_size = {wide}
num_hidden_layers = {deep}
num_attention_heads = 4
intermediate_size = {wide_inner}
patch_size = 4
image_size = 32
num_channels = 1
[modules.projector]
model = "mlp"
[parallelism.vision]
ranks = [0]
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
"""

_LLM = """
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = {width}
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 4
head_dim = {head}
intermediate_size = {inner}
tie_word_embeddings = false
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = {{ {kinds} }}
items = {items}
max_text = {text}
[training]
local_batch_size = {samples}
pack_samples = true
steps = 1000
[checkpoint]
enable = false
[parallelism.llm]
ranks = [0]
"""


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        ranks: how many there are.
        width, layers: of the LLM.
        wide, deep: of the encoder; 0: there is none.
        samples: per step.
        text: most text tokens of a sample.
        trainable: whether the encoder is.
        fixed: what its layouts keep to, as `hetmesh tune --fix`.
    """

    ranks: int
    width: int
    layers: int
    wide: int = 0
    deep: int = 0
    samples: int = 16
    text: int = 60
    trainable: bool = True
    fixed: dict[str, Any] = field(default_factory=dict)

    def asked(self, machine: str | None = None) -> Asked:
        """What tuning it is asked for."""
        text = _VISION.format(
            trainable=str(self.trainable).lower(), wide=self.wide, wide_inner=4 * self.wide, deep=self.deep
        )
        text = text * (self.deep > 0) + _LLM.format(
            width=self.width,
            layers=self.layers,
            head=self.width // 4,
            inner=self.width * 11 // 4,
            kinds="image = [1, 32, 32]" if self.deep else "",
            items=1 if self.deep else 0,
            text=self.text,
            samples=self.samples,
        )
        return Asked(parse_recipe(text), "recipe.toml", text, (), self.ranks, machine, None, self.fixed)


_KEPT = {f"{name}.activation_checkpoint": "none" for name in ("vision", "llm")} | {"microbatch_size": 4}
_FEW = {f"{name}.data_parallel_shard_degree": 1 for name in ("vision", "llm")} | {"vision.tensor_parallel_degree": 1}
PROBLEMS = {
    "small encoder, 2 ranks": Case(2, 256, 4, 160, 3, fixed=_KEPT),
    "large frozen encoder, 2 ranks": Case(2, 224, 3, 256, 6, trainable=False, fixed=_KEPT),
    "text alone, 2 ranks": Case(2, 320, 4, text=180),
    "encoder as large as the LLM, 3 ranks": Case(3, 224, 4, 224, 4, samples=24, fixed=_KEPT),
    "small encoder, 4 ranks": Case(4, 256, 4, 160, 3, samples=32, fixed=_KEPT | _FEW),
}
