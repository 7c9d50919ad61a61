"""Encoders and LLMs by their size: the published rows give sizes alone, so these are usual shapes of such sizes.

Encoders are ViTs: pre-norm blocks, an MLP of two products. LLMs are of the LLaMA kind: gated MLP, grouped
keys, RMSNorm, embedding and head apart, both split over tensor parallel ranks. A size between two of the tables takes
the nearest shape (by ratio) with more or fewer layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetmesh.cost import LayerShape, ModuleShape, WeightShape

PATCH = 3 * 14 * 14  # values of a patch


@dataclass(frozen=True)
class Encoder:
    """A ViT; `like` says which model has this shape."""

    size: float
    like: str
    layers: int
    width: int
    inner: int

    def shape(self) -> ModuleShape:
        """Patch embedding, blocks, final norm."""
        patches = WeightShape("embeddings.patch.weight", (self.width, PATCH), 1)
        blocks = [self._block(f"layers.{i}") for i in range(self.layers)]
        return ModuleShape("vision", (LayerShape("embeddings", (patches,)), *blocks, _norm("norm", self.width)))

    def _block(self, name: str) -> LayerShape:
        w, attention, mlp = self.width, f"{name}.attention", f"{name}.mlp"
        weights = (
            *_norm(f"{name}.norm1", w).weights,
            *(_product(f"{attention}.{key}", w, w, 0) for key in ("q", "k", "v")),
            _product(f"{attention}.out", w, w, 1),
            *_norm(f"{name}.norm2", w).weights,
            _product(f"{mlp}.fc1", self.inner, w, 0),
            _product(f"{mlp}.fc2", w, self.inner, 1),
        )
        return LayerShape(name, weights, w, key_width=w)


@dataclass(frozen=True)
class Decoder:
    """An LLM; `heads` is query heads x head size, `keys` the same of keys and values."""

    size: float
    like: str
    layers: int
    width: int
    inner: int
    heads: int
    keys: int
    vocabulary: int

    def shape(self) -> ModuleShape:
        """Embedding, blocks, final norm, head."""
        table = self.vocabulary, self.width
        embedding = LayerShape("embed", (WeightShape("embed.weight", table, 0, tp_dim=0),))
        head = (WeightShape("head.weight", table, 1, tp_dim=0),)
        head = LayerShape("head", head, on_targets=True, shares_logits=True)
        blocks = [self._block(f"layers.{i}") for i in range(self.layers)]
        norm = LayerShape("norm", (WeightShape("norm.weight", (self.width,)),))
        return ModuleShape("llm", (embedding, *blocks, norm, head))

    def _block(self, name: str) -> LayerShape:
        w, attention, mlp = self.width, f"{name}.attention", f"{name}.mlp"
        weights = (
            WeightShape(f"{name}.norm1.weight", (w,)),
            _product(f"{attention}.q", self.heads, w, 0),
            _product(f"{attention}.k", self.keys, w, 0),
            _product(f"{attention}.v", self.keys, w, 0),
            _product(f"{attention}.out", w, self.heads, 1),
            WeightShape(f"{name}.norm2.weight", (w,)),
            _product(f"{mlp}.gate", self.inner, w, 0),
            _product(f"{mlp}.up", self.inner, w, 0),
            _product(f"{mlp}.down", w, self.inner, 1),
        )
        return LayerShape(name, weights, self.heads, key_width=self.keys, causal=True)


def _product(name: str, outputs: int, inputs: int, tp_dim: int) -> WeightShape:
    return WeightShape(f"{name}.weight", (outputs, inputs), 1, tp_dim=tp_dim)


def _norm(name: str, width: int) -> LayerShape:
    return LayerShape(name, tuple(WeightShape(f"{name}.{key}", (width,)) for key in ("weight", "bias")))


ENCODERS = (
    Encoder(0.4, "SigLIP-so400m", 27, 1152, 4304),
    Encoder(1.0, "EVA-CLIP-g", 40, 1408, 6144),
    Encoder(3.0, "a ViT of 48 x 2304", 48, 2304, 9216),
    Encoder(6.0, "InternViT-6B", 45, 3200, 12800),
    Encoder(7.2, "a ViT of 47 x 3584", 47, 3584, 14336),
    Encoder(12.0, "a ViT of 47 x 4608", 47, 4608, 18432),
    Encoder(22.0, "ViT-22B", 48, 6144, 24576),
)
DECODERS = (
    Decoder(1.7, "Qwen3-1.7B", 28, 2048, 6144, 2048, 1024, 151936),
    Decoder(7.0, "Mistral-7B", 32, 4096, 14336, 4096, 1024, 32000),
    Decoder(8.0, "Qwen3-8B", 36, 4096, 12288, 4096, 1024, 151936),
    Decoder(14.0, "Qwen3-14B", 40, 5120, 17408, 5120, 1024, 151936),
    Decoder(32.0, "Qwen3-32B", 64, 5120, 25600, 8192, 1024, 151936),
    Decoder(70.0, "LLaMA-3-70B", 80, 8192, 28672, 8192, 1024, 128256),
    Decoder(120.0, "Mistral-Large", 88, 12288, 28672, 12288, 1024, 32768),
    Decoder(175.0, "GPT-3's depth and width", 96, 12288, 32768, 12288, 12288, 51200),
)


def encoder(size: float) -> Encoder:
    """The encoder of a size in billions of parameters."""
    found = min(ENCODERS, key=lambda each: max(each.size / size, size / each.size))
    return found if found.size == size else replace(found, layers=max(round(found.layers * size / found.size), 1))


def decoder(size: float) -> Decoder:
    """The LLM of a size in billions of parameters."""
    found = min(DECODERS, key=lambda each: max(each.size / size, size / each.size))
    return found if found.size == size else replace(found, layers=max(round(found.layers * size / found.size), 1))


def projector(encoder: Encoder, decoder: Decoder) -> ModuleShape:
    """Two products between them, as LLaVA has."""
    first = _product("linear_1", decoder.width, encoder.width, 0)
    second = _product("linear_2", decoder.width, decoder.width, 1)
    return ModuleShape("projector", (LayerShape("linear_1", (first,)), LayerShape("linear_2", (second,))))


def described(each: Encoder | Decoder) -> str:
    """One line of a list."""
    billions = each.shape().parameters / 1e9
    return f"{each.size:g}B: {each.like}, {each.layers} layers of {each.width}, {billions:.2f}B parameters"
