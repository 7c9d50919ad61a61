"""LLMs of published runs: sizes by the name of a model, or shaped by its parameters where the name is not known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.planner.architectures import decoder
from hetmesh.cost import LayerShape, ModuleShape, WeightShape

LORA_RANK = 16
"""Of every adapter: AutoModel's benchmark configurations have 16, Megatron-Bridge's default is 32; neither matters to a
step, as an adapter of this rank is under 1% of the product beside it."""
EXPERT_MULTIPLE = 8
"""The number of experts of a model that is shaped by its parameters is a multiple of this."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: ranks of the compressed queries (0: they are not) and of keys and values, and sizes
    of a head's parts with and without rotation and of its value."""

    query: int = 1536
    key: int = 512
    plain: int = 128
    rotated: int = 64
    value: int = 128


@dataclass(frozen=True)
class LlmSizes:
    """A decoder of gated MLPs and RMSNorms.

    Attributes:
        source: where the sizes are from.
        inner: width of a dense MLP.
        experts, chosen, expert_inner: of a mixture of experts; 0 experts: every layer is dense.
        shared_inner: of the MLP beside the experts, through which all tokens go.
        dense_layers: at the front of a mixture of experts.
        window: tokens that every other layer attends to at most; 0: all do to all.
        copies: sets of weights of every block, of which a token goes through one (mixture of transformers).
    """

    source: str
    layers: int
    width: int
    heads: int
    key_heads: int
    head: int
    inner: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_layers: int = 0
    latent: LatentAttention | None = None
    window: int = 0
    copies: int = 1

    @cached_property
    def counts(self) -> tuple[float, float]:
        """Billions of all parameters, and of those that a token goes through."""
        weights = self.shape(1).weights
        idle = sum(w.numel * (1 - w.per_row / w.shape[0]) for w in weights if w.expert)
        idle += sum(w.numel for w in weights if ".copy" in w.name)
        total = sum(w.numel for w in weights)
        return total / 1e9, (total - idle) / 1e9

    def shape(self, tokens: int) -> ModuleShape:
        """Embedding, blocks, final norm, head; all trained. `tokens`: of a sequence, for layers with a window."""
        table = self.vocabulary, self.width
        embedding = LayerShape("embed", (WeightShape("embed.weight", table, 0, tp_dim=0),))
        head = (WeightShape("head.weight", table, 1, tp_dim=0),)
        norm = LayerShape("norm", (WeightShape("norm.weight", (self.width,)),))
        blocks = (self._block(i, tokens) for i in range(self.layers))
        last = LayerShape("head", head, on_targets=True, shares_logits=True)
        return ModuleShape("llm", (embedding, *blocks, norm, last))

    def _block(self, index: int, tokens: int) -> LayerShape:
        name, key = f"layers.{index}", self.key_heads * self.head
        value = self.latent.value if self.latent else self.head
        # of a head its two products, with keys and with values, may differ in size
        each = (self.latent.plain + self.latent.rotated + value) // 2 if self.latent else self.head
        attention = self._latent(name, self.latent) if self.latent else self._grouped(name)
        attention = (*attention, _product(f"{name}.attention.out", self.width, self.heads * value, 1))
        sparse = self.experts and index >= self.dense_layers
        mlp = self._experts(name) if sparse else _mlp(f"{name}.mlp", self.inner, self.width)
        weights = (
            WeightShape(f"{name}.norm1.weight", (self.width,)),
            *attention,
            WeightShape(f"{name}.norm2.weight", (self.width,)),
            *mlp,
        )
        others = tuple(
            replace(w, name=f"{w.name}.copy{i}", per_row=0) for i in range(1, self.copies) for w in weights if w.per_row
        )
        # a row sees `window` of the tokens before it, where it would see half of all on average
        seen = min(2 * self.window / tokens, 1.0) if self.window and index % 2 == 0 else 1.0
        return LayerShape(
            name,
            (*weights, *others),
            max(round(seen * self.heads * each), 1),
            key_width=self.heads * each if self.latent else key,
            causal=True,
            key_heads=0 if self.latent else self.key_heads,
        )

    def _grouped(self, name: str) -> tuple[WeightShape, ...]:
        sizes = {"q": self.heads, "k": self.key_heads, "v": self.key_heads}
        return tuple(_product(f"{name}.attention.{k}", n * self.head, self.width, 0) for k, n in sizes.items())

    def _latent(self, name: str, latent: LatentAttention) -> tuple[WeightShape, ...]:
        """Compressing products count as shares of tensor-parallel ranks. Megatron-Core computes them on each, which is
        3% more of a block."""
        queries = self.heads * (latent.plain + latent.rotated)
        first = _product(f"{name}.attention.q", latent.query or queries, self.width, 0)
        down = _product(f"{name}.attention.kv_down", latent.key + latent.rotated, self.width, 0)
        up = _product(f"{name}.attention.kv_up", self.heads * (latent.plain + latent.value), latent.key, 0)
        own = (_product(f"{name}.attention.q_up", queries, latent.query, 0),) if latent.query else ()
        return (first, down, *own, up)

    def _experts(self, name: str) -> tuple[WeightShape, ...]:
        sizes = (self.experts, 2, self.expert_inner, self.width), (self.experts, self.width, self.expert_inner)
        up = WeightShape(f"{name}.mlp.experts.gate_up.weight", sizes[0], self.chosen, tp_dim=2, within=2)
        down = WeightShape(f"{name}.mlp.experts.down.weight", sizes[1], self.chosen, tp_dim=2, within=1)
        router = WeightShape(f"{name}.mlp.router.weight", (self.experts, self.width), 1)
        shared = _mlp(f"{name}.mlp.shared", self.shared_inner, self.width) if self.shared_inner else ()
        return (router, up, down, *shared)


def _product(name: str, outputs: int, inputs: int, tp_dim: int) -> WeightShape:
    return WeightShape(f"{name}.weight", (outputs, inputs), 1, tp_dim=tp_dim)


def _mlp(name: str, inner: int, width: int) -> tuple[WeightShape, ...]:
    gate, up = (_product(f"{name}.{key}", inner, width, 0) for key in ("gate", "up"))
    return gate, up, _product(f"{name}.down", width, inner, 1)


_SEEN = "the model's config.json"
_REMEMBERED = "the model's config.json, as remembered"
_CLASS = "defaults of transformers' class"
_QWEN_25_7B = LlmSizes(_SEEN, 28, 3584, 28, 4, 128, 18944, 152064)
NAMED = {
    "llama38b": LlmSizes("arXiv 2407.21783, table 3", 32, 4096, 32, 8, 128, 14336, 128256),
    "llama370b": LlmSizes("arXiv 2407.21783, table 3", 80, 8192, 64, 8, 128, 28672, 128256),
    "llama3405b": LlmSizes("arXiv 2407.21783, table 3", 126, 16384, 128, 8, 128, 53248, 128256),
    "qwen2.57b": _QWEN_25_7B,
    "qwen2.532b": LlmSizes(_SEEN, 64, 5120, 40, 8, 128, 27648, 152064),
    "qwen38b": LlmSizes(_SEEN, 36, 4096, 32, 8, 128, 12288, 151936),
    "qwen332b": LlmSizes(_REMEMBERED, 64, 5120, 64, 8, 128, 25600, 151936),
    "qwen330ba3b": LlmSizes(_SEEN, 48, 2048, 32, 4, 128, 6144, 151936, 128, 8, 768),
    "qwen3235ba22b": LlmSizes(_REMEMBERED, 94, 4096, 64, 4, 128, 12288, 151936, 128, 8, 1536),
    "mixtral8x7b": LlmSizes("arXiv 2401.04088, table 1", 32, 4096, 32, 8, 128, 14336, 32000, 8, 2, 14336),
    "gptoss20b": LlmSizes(_SEEN, 24, 2880, 64, 8, 64, 2880, 201088, 32, 4, 2880, window=128),
    "gptoss120b": LlmSizes(_CLASS, 36, 2880, 64, 8, 64, 2880, 201088, 128, 4, 2880, window=128),
    "deepseekv3": LlmSizes(_CLASS, 61, 7168, 128, 128, 128, 18432, 129280, 256, 8, 2048, 2048, 3, LatentAttention()),
    "moonlight16ba3b": LlmSizes(
        _SEEN, 27, 2048, 16, 16, 128, 11264, 163842, 64, 6, 1408, 2816, 1, LatentAttention(query=0)
    ),
    "bagel7bmot": replace(_QWEN_25_7B, source="arXiv 2505.14683: Qwen2.5-7B twice", copies=2),
}
"""By `name_key` of the name."""


def name_key(model: str) -> str:
    """A model's name as `NAMED` has it."""
    key = re.sub(r"[^a-z0-9.]", "", model.lower())
    key = re.sub(r"(instruct|base|chat|hf|bf16)$", "", key).removeprefix("meta")
    return re.sub(r"^llama3\.[1-3]", "llama3", key)


def llm_sizes(model: str, total: float, active: float, experts_over: int) -> tuple[LlmSizes, str]:
    """The LLM of a model, and what is to be said where its sizes are not those of its name.

    Args:
        total, active: billions of parameters, without encoders.
        experts_over: ranks that share the experts, which their number is a multiple of.
    """
    if known := NAMED.get(name_key(model)):
        return known, ""
    sizes = _dense(total) if active > 0.9 * total else _sparse(total, active, experts_over)
    all_of_it, used = sizes.counts
    mixture = f", {sizes.experts} experts of which {sizes.chosen} are chosen" if sizes.experts else ""
    shape = f"{sizes.layers} layers of {sizes.width}{mixture}"
    return sizes, f"unknown model, shaped like {sizes.source}: {shape}, {all_of_it:.3g}B parameters, {used:.3g}B active"


def _dense(total: float) -> LlmSizes:
    """The usual decoder that is nearest by size (`bench.py planner`'s), with more or fewer layers."""
    like = decoder(total)
    heads, keys = like.heads // 128, like.keys // 128
    return _as_large(LlmSizes(like.like, 1, like.width, heads, keys, 128, like.inner, like.vocabulary), total)


def _sparse(total: float, active: float, experts_over: int) -> LlmSizes:
    """The mixture of experts that is nearest by what is active, with more or fewer layers, and as many experts as make
    the total."""
    named = {name: sizes for name, sizes in NAMED.items() if sizes.experts}
    like = min(named, key=lambda name: abs(math.log(named[name].counts[1] / active)))
    sizes = _as_large(replace(named[like], source=like), active)
    multiple = math.lcm(EXPERT_MULTIPLE, experts_over)
    least = replace(sizes, experts=multiple * -(-sizes.chosen // multiple))
    each = 3 * sizes.width * sizes.expert_inner * (sizes.layers - sizes.dense_layers) / 1e9
    more = max(round((total - least.counts[0]) / each / multiple), 0) * multiple
    return replace(least, experts=least.experts + more)


def _as_large(sizes: LlmSizes, active: float) -> LlmSizes:
    """`sizes` with as many layers as make `active` billions of parameters that a token goes through; embedding and head
    are a third of these at most."""
    vocabulary = min(sizes.vocabulary, max(round(active * 1e9 / 6 / sizes.width), 1))
    least, more = (replace(sizes, vocabulary=vocabulary, layers=sizes.dense_layers + n) for n in (1, 2))
    block = more.counts[1] - least.counts[1]
    return replace(least, layers=least.layers + max(round((active - least.counts[1]) / block), 0))


def frozen(shape: ModuleShape) -> ModuleShape:
    """`shape` with nothing trained."""
    return _mapped(shape, lambda w: (replace(w, trainable=False),))


def with_adapters(shape: ModuleShape) -> ModuleShape:
    """`shape` frozen, with a low-rank adapter beside every product of its blocks, as `hetmesh` has them for LoRA; the
    experts of a rank share one."""

    def adapted(weight: WeightShape) -> tuple[WeightShape, ...]:
        base = replace(weight, trainable=False)
        if not weight.per_row or not weight.name.startswith("layers.") or weight.name.endswith("router.weight"):
            return (base,)
        name = weight.name.removesuffix(".weight")
        outputs = math.prod(weight.shape[1:-1]) if weight.expert else weight.outputs
        halves = (
            WeightShape(f"{name}.lora_A.default.weight", (LORA_RANK, weight.inputs), weight.per_row),
            WeightShape(f"{name}.lora_B.default.weight", (outputs, LORA_RANK), weight.per_row),
        )
        first, second = halves
        if weight.splits_inputs:
            first = replace(first, tp_dim=1)
        elif weight.splits_outputs:
            second = replace(second, tp_dim=0)
        return replace(base, name=f"{name}.base_layer.weight"), first, second

    return _mapped(shape, adapted)


def _mapped(shape: ModuleShape, change: Callable[[WeightShape], tuple[WeightShape, ...]]) -> ModuleShape:
    layers = (replace(x, weights=tuple(new for w in x.weights for new in change(w))) for x in shape.layers)
    return replace(shape, layers=tuple(layers))
