"""What of a module costs anything: its weights and its attention, layer by layer. Adapters describe themselves so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hetmesh.layout.hashing import HashedOnce


@dataclass(frozen=True)
class WeightShape:
    """One parameter.

    Attributes:
        name: its FQN in the module.
        shape: before any sharding.
        per_row: how often it multiplies for each row that enters the blocks: 1 for a linear layer, 2 for a convolution
            with two outputs per row, 0 for what is looked up or applied elementwise (embeddings, norms, biases).
        trainable: whether it gets a gradient of its own.
        tp_dim: the dim that tensor parallelism splits; None: replicated.
    """

    name: str
    shape: tuple[int, ...]
    per_row: int = 0
    trainable: bool = True
    tp_dim: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class LayerShape(HashedOnce):
    """One layer of a module.

    Attributes:
        name: its FQN; empty for parameters that belong to no layer.
        weights: its parameters. One that several layers share (a tied head) is listed by each of them.
        attention_width: query heads x head size, summed over the attentions in the layer; 0 without.
        key_width: key heads x head size, summed alike: what context-parallel ranks fetch of a token, twice.
        causal: its attention hides later positions: a kernel computes half of the (query, key) pairs.
        on_targets: it runs on target positions alone, as the head of an LLM does.
        shares_logits: of such a head: tensor-parallel ranks that split it keep shares of the vocabulary in the loss.
    """

    name: str
    weights: tuple[WeightShape, ...] = ()
    attention_width: int = 0
    on_targets: bool = False
    key_width: int = 0
    causal: bool = False
    shares_logits: bool = False

    __hash__ = HashedOnce.__hash__

    @property
    def trainable(self) -> bool:
        """Whether anything in it gets a gradient of its own."""
        return any(weight.trainable for weight in self.weights)


@dataclass(frozen=True)
class ModuleShape(HashedOnce):
    """The layers of a module in execution order."""

    name: str
    layers: tuple[LayerShape, ...]

    __hash__ = HashedOnce.__hash__

    @cached_property
    def weights(self) -> tuple[WeightShape, ...]:
        """Every parameter once."""
        return tuple({weight.name: weight for layer in self.layers for weight in layer.weights}.values())

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(weight.numel for weight in self.weights)

    @property
    def trainable_parameters(self) -> int:
        """Elements of the parameters that get a gradient."""
        return sum(weight.numel for weight in self.weights if weight.trainable)
