"""A decoder of Gated DeltaNet and attention whose tokens two ranks share: measured, and predicted from its layers.

Each round runs, forward and backward: the whole row on one rank while the other sleeps; both ranks with their shares;
then, for the prediction, layers of either kind on one rank at three lengths, and half a row on each rank alone and on
both at once, which is how much they slow each other down. The best of all rounds count. From the layers a profile is
fitted, and the simulator says what a rank's share takes, maps at cuts and what is sent included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.advantage.measure import machine_file, measure_machine
from benchmarks.busy import BusyMeter, busy_slowdown, pin
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.in_transformers import use_in
from hetmesh.attention.mixers import mixers, use_in_mixer
from hetmesh.context import Mask, assign, causal, join
from hetmesh.cost import Machine, ModuleShape, Observation, Profile, fit, layer_kind, load_machine
from hetmesh.cost.flops import token_costs
from hetmesh.graph import ModuleSpec, Stage
from hetmesh.layout import Intervals, MeshSpec
from hetmesh.models.adapter import Abilities
from hetmesh.models.module_shape import module_shape
from hetmesh.resolve.recipe_step_model import measure_peak
from hetmesh.simulate.layer_costs import LayerCosts
from hetmesh.simulate.rank_work import shared_work
from hetmesh.simulate.stage_costs import ModuleCosts, StageCosts
from hetmesh.testing.pool import WorkerPool

WIDTH, HEADS, FEATURES = 256, 4, 64
LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = (LINEAR, LINEAR, LINEAR, FULL)


def speedup(tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of one rank over those of two, measured and predicted. `tokens`: of three samples in one row."""
    mask, shape = join([causal(tokens * n // 8) for n in (5, 2, 1)]), _shape()
    row, cut = token_costs(shape, 4)
    shares = assign(mask, 2, row_cost=row, cut_cost=cut)
    with WorkerPool(2) as pool, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.toml")
        path.write_text(machine_file(pool.run(measure_machine, 3, 0.05, timeout=300.0)), "utf-8")
        machine = replace(load_machine(path), peak_flops={"float32": measure_peak(torch.float32)})
        ranks = pool.run(_turns, mask, shares, rounds, timeout=1800.0)
    sent = shape.layers[0].recurrences[0].cut_bytes(4)
    slowdown = busy_slowdown(([min(rank.alone)], [min(rank.together)]) for rank in ranks)[-1]
    profile = _profile(shape, ranks[0].layers)
    whole, shared = (_predicted(shape, profile, machine, mask, each) for each in ((((0, tokens),),), shares))
    measured = [min(ranks[0].whole), min(map(max, zip(*(rank.shared for rank in ranks), strict=True)))]
    predicted = [sum(whole), shared[0] * slowdown + shared[1]]
    return {
        "speedup": measured[0] / measured[1],
        "predicted": predicted[0] / predicted[1],
        "seconds": measured,
        "predicted_seconds": predicted,
        "busy_slowdown": slowdown,
        "rows": [sum(b - a for a, b in runs) for runs in shares],
        "cuts": shared_work(mask, shares, _spec(2, shape), llm=True)[0].cuts.all,
        "cut_bytes": sent.forward + sent.backward,
    }


@dataclass
class Turns:
    """Seconds of one rank by round; of layers by kind, length and part."""

    whole: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    layers: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)


def _turns(rank: int, mask: Mask, shares: tuple[Intervals, ...], rounds: int) -> Turns:
    pin(rank)
    torch.manual_seed(0)
    decoder, found, tokens = _decoder(), Turns(), mask.length
    whole = ContextAttention(mask, name="llm attention")
    shared = ContextAttention(mask, shares, (0, 1), name="llm attention")
    half = ContextAttention(causal(tokens // 2), name="llm attention")
    meter = BusyMeter(lambda: _seconds(decoder.layers, decoder, half), 0.0)
    for i in range(rounds + 1):
        dist.barrier()
        if rank == 0:
            found.whole.append(sum(_seconds(decoder.layers, decoder, whole)))
            for kind, length in [(kind, tokens // n) for kind in (LINEAR, FULL) for n in (4, 2, 1)]:
                state = ContextAttention(causal(length), name="llm attention")
                spent = _seconds([decoder.layers[LAYERS.index(kind)]], decoder, state)
                for part, seconds in zip(("forward", "backward"), spent, strict=True):
                    found.layers.setdefault((kind, length, part), []).append(seconds)
        dist.barrier()
        found.shared.append(sum(_seconds(decoder.layers, decoder, shared)))
        meter.round()
        if i == 0:  # which plans and warms up
            for series in (found.whole, found.shared, meter.alone, meter.together, *found.layers.values()):
                series.clear()
    found.alone, found.together = meter.alone, meter.together
    return found


def _seconds(layers: Sequence[nn.Module], decoder: Any, state: ContextAttention) -> tuple[float, float]:
    """Of a forward and a backward."""
    rows = sum(b - a for a, b in state.shares[state.coordinate])
    x = torch.randn(1, rows, WIDTH, requires_grad=True)
    at = torch.cat([torch.arange(a, b) for a, b in state.shares[state.coordinate]])[None]
    angles = decoder.rotary_emb(x, at.expand(3, 1, -1))
    started, hidden = time.perf_counter(), x
    for layer in layers:
        hidden = layer(hidden, position_embeddings=angles, attention_mask=None, attention_state=state)
    between = time.perf_counter()
    gradient: Tensor = hidden.detach()
    hidden.backward(gradient)
    return between - started, time.perf_counter() - between


def _decoder() -> Any:
    """Its layers take samples in one row."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextConfig, Qwen3_5TextModel

    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "head_dim": FEATURES}
    heads |= {"linear_num_key_heads": HEADS // 2, "linear_num_value_heads": HEADS}
    heads |= {"linear_key_head_dim": FEATURES, "linear_value_head_dim": FEATURES, "layer_types": list(LAYERS)}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": len(LAYERS), "vocab_size": 8}
    config = Qwen3_5TextConfig(**sizes, **heads)
    decoder = Qwen3_5TextModel(config)
    use_in(decoder, config)
    for mixer in (mixer for layer in decoder.layers for mixer in mixers(layer)):
        use_in_mixer(mixer, padded=False)
    return decoder


def _shape() -> ModuleShape:
    with torch.device("meta"):
        decoder = _decoder()
    abilities = Abilities(token_gathered=("layers.*.linear_attn",))
    names = tuple(f"layers.{i}" for i in range(len(LAYERS)))
    adapter: Any = SimpleNamespace(abilities=abilities, out_features=None, layers=lambda: names)
    shape = module_shape("llm", adapter, decoder, {})
    return ModuleShape("llm", tuple(layer for layer in shape.layers if layer.name in names))


def _spec(ranks: int, shape: ModuleShape) -> ModuleSpec:
    layers = tuple(layer.name for layer in shape.layers)
    return ModuleSpec("llm", MeshSpec.make(range(ranks), cp=ranks), layers, packed=True, token_costs=(1, 1))


def _profile(shape: ModuleShape, layers: dict[tuple[str, int, str], list[float]]) -> Profile:
    observations = []
    for (kind, length, part), seconds in layers.items():
        layer, alone = layer_kind(shape.layers[LAYERS.index(kind)]), causal(length)
        (whole,) = shared_work(alone, (((0, length),),), _spec(1, shape), llm=True)
        pairs = whole.work.pairs if kind == FULL else 0
        parts = {"forward": ("forward",), "backward": ("backward", "backward_input")}[part]
        observations += [Observation(layer, each, length, pairs, min(seconds)) for each in parts]
        if part == "backward":  # one measurement of both
            observations.append(Observation(layer, "backward_weight", length, pairs, 0.0))
    return fit(observations)


def _predicted(
    shape: ModuleShape, profile: Profile, machine: Machine, mask: Mask, shares: Sequence[Intervals]
) -> tuple[float, float]:
    """Seconds of computation and of collectives, on the rank that takes longest."""
    spec = _spec(len(shares), shape)
    module = ModuleCosts(spec, shape, True, LayerCosts(machine, profile))
    costs = StageCosts(module, Stage("llm", 0), fed=True, backward=True, recompute=False)
    (cost,) = costs.costs([shared_work(mask, shares, spec, llm=True)])
    sent = cost.collectives_forward + cost.collectives_backward
    return cost.forward + cost.backward_input + cost.backward_weight - sent, sent
