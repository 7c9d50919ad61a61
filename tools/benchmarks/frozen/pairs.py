"""Simulated speed-ups of encoders with LLMs as in the literature, too large to run here.

Cornstarch (arXiv 2503.11367) compares such models on 24 GPUs. Sizes are of published models; layers are counted with
their matrix products and attention alone, on a machine of one FLOP/s, since only ratios matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.stage_counts import Chain, frozen_blind, stage_counts
from benchmarks.frozen.stage_costs import Times, makespan
from hetmesh.cost import LayerShape, ModuleShape, Rates, WeightShape, Work, module_times
from hetmesh.graph import Activation, BoundarySpec, ModuleGraph, ModuleSpec
from hetmesh.layout import MeshSpec

RANKS = 24
TP = 2
MICROBATCHES = 24


@dataclass(frozen=True)
class Transformer:
    """Sizes of a stack of equal blocks; `gated`: with three products in the MLP, as in LLaMA."""

    layers: int
    width: int
    inner: int
    key_width: int
    gated: bool = False
    vocabulary: int = 0

    def shape(self, name: str, trainable: bool) -> ModuleShape:
        """Its blocks, and its head if it has a vocabulary."""
        products = {
            "q": (self.width, self.width),
            "k": (self.key_width, self.width),
            "v": (self.key_width, self.width),
            "o": (self.width, self.width),
            "up": (self.inner, self.width),
            "down": (self.width, self.inner),
        }
        if self.gated:
            products["gate"] = (self.inner, self.width)
        blocks = [_layer(f"{i}", products, trainable, self.width) for i in range(self.layers)]
        head = {"head": (self.vocabulary, self.width)}
        return ModuleShape(name, (*blocks, *([_layer("head", head, trainable, 0)] if self.vocabulary else [])))


def _layer(name: str, products: Mapping[str, tuple[int, int]], trainable: bool, attention: int) -> LayerShape:
    weights = tuple(WeightShape(f"{name}.{key}", shape, 1, trainable, 0) for key, shape in products.items())
    return LayerShape(name, weights, attention)


VIT_22B = Transformer(48, 6144, 24576, 6144)
INTERN_VIT_6B = Transformer(45, 3200, 12800, 3200)
WHISPER = Transformer(32, 1280, 5120, 1280)  # the encoder of whisper-large
LLAMA_70B = Transformer(80, 8192, 28672, 1024, True, 32000)
LLAMA_8B = Transformer(32, 4096, 14336, 1024, True, 128256)

TEXT = 1024
PATCHES = 91 * 51  # of 14 x 14 pixels in an image of 1280 x 720
IMAGE = Work(PATCHES, PATCHES**2)
IMAGE_TOKENS = PATCHES // 4  # 2 x 2 patches become one token
SPEECH = Work(1500, 1500**2)  # 30 s
SPEECH_TOKENS = 750


def _tokens(count: int) -> Work:
    return Work(count, count**2, TEXT)


PAIRS = {
    "ViT-22B + LLaMA-70B": ({"vision": (VIT_22B, IMAGE)}, (LLAMA_70B, _tokens(IMAGE_TOKENS + TEXT))),
    "Whisper + ViT-6B + LLaMA-8B": (
        {"audio": (WHISPER, SPEECH), "vision": (INTERN_VIT_6B, IMAGE)},
        (LLAMA_8B, _tokens(IMAGE_TOKENS + SPEECH_TOKENS + TEXT)),
    ),
}
"""Encoders with what they read in a microbatch, and the LLM."""


def simulated() -> list[dict[str, Any]]:
    """Per pair, with frozen encoders and the LLM trained or frozen (a projector of each encoder is trained)."""
    return [
        {"pair": name, "llm": "frozen" if frozen else "trained"} | _simulate(encoders, llm, frozen)
        for name, (encoders, llm) in PAIRS.items()
        for frozen in (False, True)
    ]


def _simulate(encoders: Mapping[str, tuple[Transformer, Work]], llm: tuple[Transformer, Work], frozen: bool) -> dict:
    true, blind = {}, {}
    for name, (size, work) in {**encoders, "llm": llm}.items():
        sink = name == "llm"
        shape = size.shape(name, trainable=sink and not frozen)
        true[name] = module_times(shape, work, Rates(1.0), upstream=sink, tp=TP)
        blind[name] = {layer: frozen_blind(time) for layer, time in true[name].items()}
    for name, (size, work) in encoders.items():
        product = WeightShape("projector", (llm[0].width, size.width), 1, True, 0)
        shape = ModuleShape("projector", (LayerShape("projector", (product,)),))
        key = f"{name} projector"
        true[key] = module_times(shape, work, Rates(1.0), upstream=False, tp=TP)
        blind[key] = {layer: frozen_blind(time) for layer, time in true[key].items()}
    cuts = {kind: _cut(encoders, times) for kind, times in (("aware", true), ("blind", blind))}
    spent = {kind: makespan(_graph(encoders, true, cut), true, MICROBATCHES) for kind, cut in cuts.items()}
    stages = {kind: {name: list(cut[name]) for name in cut} for kind, cut in cuts.items()}
    return {"speedup": spent["blind"] / spent["aware"], "layers_per_stage": stages}


def _cut(encoders: Mapping[str, Any], times: Times) -> Mapping[str, tuple[int, ...]]:
    """Layers of each stage of the partition that looks best by `times`."""
    chains = {
        name: Chain(
            tuple(t.forward for t in layers.values()),
            tuple(t.backward for t in layers.values()),
            TP,
            follows="llm" if name.endswith("projector") else None,
        )
        for name, layers in times.items()
    }
    one = {name: (len(layers),) for name, layers in times.items()}
    return stage_counts(_graph(encoders, times, one), chains, RANKS, MICROBATCHES).layers


def _graph(encoders: Mapping[str, Any], times: Times, cuts: Mapping[str, tuple[int, ...]]) -> ModuleGraph:
    """The modules on ranks of their own, stage after stage; projectors on the first stage of the LLM."""
    free = itertools.count()
    modules, first = [], ()
    for name in (*encoders, "llm"):
        ranks = [next(free) for _ in range(TP * len(cuts[name]))]
        layers = iter(times[name])
        splits = tuple(tuple(itertools.islice(layers, count)) for count in cuts[name])
        mesh = MeshSpec.make(ranks, pp=len(cuts[name]), tp=TP)
        options = {"trainable": _trained(times[name]), "splits": splits, "activation": Activation(1, True)}
        modules.append(ModuleSpec(name, mesh, tuple(times[name]), **options))
        first = ranks[:TP]
    projectors = [f"{name} projector" for name in encoders]
    modules += [ModuleSpec(name, MeshSpec.make(first, tp=TP), ("projector",)) for name in projectors]
    boundaries = [BoundarySpec(name, f"{name} projector") for name in encoders]
    return ModuleGraph(tuple(modules), (*boundaries, *(BoundarySpec(name, "llm", name) for name in projectors)))


def _trained(layers: Mapping[str, Any]) -> bool:
    return any(time.backward_weight for time in layers.values())
