"""What of a module costs anything: its weights and its attention, layer by layer. Adapters describe themselves so."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from hetmesh.cost.recurrence import Recurrence
from hetmesh.cost.work import Work
from hetmesh.layout.hashing import HashedOnce


@dataclass(frozen=True)
class OptimizerNeeds:
    """How many tensors of a parameter's size its optimizer keeps, and whether its step gathers the whole parameter."""

    copies: int
    whole: bool


@dataclass(frozen=True)
class WeightShape:
    """One parameter.

    Attributes:
        name: its FQN in the module.
        shape: before any sharding.
        per_row: how often it multiplies for each row that enters its layer: 1 for a linear layer, 2 for a convolution
            with two outputs per row, 0 for what is looked up or applied elementwise (embeddings, norms, biases). Of
            experts: how many of them multiply each row.
        trainable: whether it gets a gradient of its own.
        tp_dim: the dim that tensor parallelism splits; None: replicated.
        within: of a stack of experts, `[experts, *outputs, inputs]`, the dim that FSDP splits where it has more ranks
            than experts; None: no such stack. Which experts multiply a row is not known before it is routed. Routing is
            taken to be even: each expert gets `per_row / experts` of all rows.
        own_rows: whether tensor-parallel ranks keep all of it, and compute with some of its rows each.
        optimizer: where a run has several, or one that is named by its class; None: the run's, by its name.
    """

    name: str
    shape: tuple[int, ...]
    per_row: int = 0
    trainable: bool = True
    tp_dim: int | None = None
    within: int | None = None
    own_rows: bool = False
    optimizer: OptimizerNeeds | None = None

    @property
    def expert(self) -> bool:
        """Whether it is a stack of experts."""
        return self.within is not None

    @property
    def outputs(self) -> int:
        """Outputs of one product."""
        return math.prod(self.shape[1:-1]) if self.expert else self.shape[0]

    @property
    def inputs(self) -> int:
        """Inputs of one product."""
        return self.shape[-1] if self.expert else self.numel // self.shape[0]

    @property
    def multiplied(self) -> int:
        """Elements that multiply each row."""
        return self.per_row * self.outputs * self.inputs if self.per_row else 0

    @property
    def splits_inputs(self) -> bool:
        """Whether tensor parallelism splits it along its inputs, so that outputs are summands."""
        return self.tp_dim == (len(self.shape) - 1 if self.expert else 1)

    @property
    def splits_outputs(self) -> bool:
        """Whether tensor parallelism splits it along its outputs."""
        if self.tp_dim is None:
            return self.own_rows
        return 0 < self.tp_dim < len(self.shape) - 1 if self.expert else self.tp_dim == 0

    @property
    def shared(self) -> bool:
        """Whether tensor-parallel ranks compute with a part of it each."""
        return self.tp_dim is not None or self.own_rows

    @property
    def numel(self) -> int:
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
        by_chunks: of such a head: logits, loss and all gradients are made by chunks of targets, in the forward.
        tokens_per_row: rows that enter it for each row of the module: patches, of which a merger after it makes one.
        attention_copies: tensors as wide as attention that its backward reads beside the outputs of products.
        row_copies: tensors as wide as its rows that it reads beside these (factors of norms that are modulated).
        recurrences: by which it remembers earlier tokens otherwise than by attention.
        key_heads: of its attention, where tensor-parallel ranks may be more and then share them; 0: they are not.
    """

    name: str
    weights: tuple[WeightShape, ...] = ()
    attention_width: int = 0
    on_targets: bool = False
    key_width: int = 0
    causal: bool = False
    shares_logits: bool = False
    tokens_per_row: int = 1
    attention_copies: int = 0
    key_heads: int = 0
    row_copies: int = 0
    by_chunks: bool = False
    recurrences: tuple[Recurrence, ...] = ()

    __hash__ = HashedOnce.__hash__

    def rows(self, work: Work) -> int:
        """Rows that go through it, of its module's work."""
        return work.targets if self.on_targets else work.rows * self.tokens_per_row

    def pairs(self, work: Work) -> int:
        """(query, key) pairs of its attention, of its module's work."""
        return work.pairs * self.tokens_per_row**2

    @cached_property
    def splits_attention(self) -> bool:
        """Whether tensor parallelism splits its attention or recurrence by heads, as it does the product that makes
        queries."""
        first = next((weight for weight in self.weights if weight.per_row), None)
        return first is None or first.shared

    def keys_on(self, tp: int) -> float:
        """Of `key_width`, what one of `tp` tensor parallel ranks that split its attention has: at least a head."""
        return self.key_width / (min(tp, self.key_heads) if self.key_heads else tp)

    @cached_property
    def expert_weights(self) -> tuple[WeightShape, ...]:
        """The stacks of experts in it."""
        return tuple(weight for weight in self.weights if weight.expert)

    @property
    def trainable(self) -> bool:
        """Whether anything in it gets a gradient of its own."""
        return any(weight.trainable for weight in self.weights)

    @property
    def trained_share(self) -> float:
        """Of what multiplies its rows, the part that is trained; of a layer without products 1 where anything is."""
        products = sum(weight.multiplied for weight in self.weights)
        trained = sum(weight.multiplied for weight in self.weights if weight.trainable)
        return trained / products if products else float(self.trainable)


_BASE, _FIRST, _SECOND = ".base_layer.", ".lora_A.", ".lora_B."  # as peft names them


def without_adapters(layer: LayerShape) -> tuple[LayerShape, tuple[WeightShape, ...]]:
    """What `layer` would be without the low-rank adapters beside its products, and the halves of these that make sums.

    An adapter reads what its product reads and adds to what that makes. So for what a product keeps and holds it counts
    as trainable where its adapter is; between the two halves there are as many elements of a row as the rank.
    """
    halves = [w for w in layer.weights if _FIRST in w.name or _SECOND in w.name]
    if not halves:
        return layer, ()
    trained = {w.name.partition(_FIRST)[0] for w in halves if _FIRST in w.name and w.trainable}

    def product(w: WeightShape) -> WeightShape:
        trainable = w.trainable or (w.per_row > 0 and w.name.partition(_BASE)[0] in trained)
        return replace(w, name=w.name.replace(_BASE, "."), trainable=trainable)

    own = tuple(product(w) for w in layer.weights if w not in halves)
    return replace(layer, weights=own), tuple(w for w in halves if _SECOND in w.name)


def expert_share(layer: LayerShape, ranks: int) -> LayerShape:
    """What one of `ranks` ranks that share the experts of `layer` evenly holds of it."""
    if ranks == 1 or not layer.expert_weights:
        return layer
    own = (replace(w, shape=(w.shape[0] // ranks, *w.shape[1:])) if w.expert else w for w in layer.weights)
    return replace(layer, weights=tuple(own))


@dataclass(frozen=True)
class ModuleShape(HashedOnce):
    """The layers of a module in execution order; `gathered_whole`: FSDP gathers all of them together."""

    name: str
    layers: tuple[LayerShape, ...]
    gathered_whole: bool = False

    __hash__ = HashedOnce.__hash__

    @cached_property
    def weights(self) -> tuple[WeightShape, ...]:
        """Every parameter once."""
        return tuple({weight.name: weight for layer in self.layers for weight in layer.weights}.values())

    @cached_property
    def frozen_layers(self) -> frozenset[str]:
        """Layers without a trainable parameter; none where something is trained that belongs to no layer, and so may
        be used before any."""
        trained = {layer.name for layer in self.layers if layer.trainable}
        return frozenset() if "" in trained else frozenset(layer.name for layer in self.layers) - trained - {""}

    @cached_property
    def uncounted(self) -> tuple[str, ...]:
        """Stacks of experts of which a row chooses an unknown number: FLOPs and seconds lack their products."""
        stacks = (w for w in self.weights if len(w.shape) > 2 and not w.per_row)
        return tuple(w.name for w in stacks if "experts" in w.name.split("."))

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(weight.numel for weight in self.weights)

    @property
    def trainable_parameters(self) -> int:
        """Elements of the parameters that get a gradient."""
        return sum(weight.numel for weight in self.weights if weight.trainable)
