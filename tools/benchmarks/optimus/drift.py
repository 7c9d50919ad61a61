"""Drift: the order that was found for one batch of a law, run on others of it, whose shares of images and sound move.

16 ranks of H100s, an LLM of 32 layers (TP 2 x PP 4, two lanes) and two encoders data parallel over all ranks, by the
drifting mixture of the balance benchmark. Execution follows dependencies, so that a stale order costs time at most.

1f1b is a weak rival where encoders lie on all stages, as they wait for each other in every microbatch: three_phase, the
coarse placement and the order found for each batch itself are compared with, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.balance.laws import AUDIO_MERGE, MERGE, mixture
from benchmarks.optimus.models import machine
from hetmesh.balance import BatchPlan, plan_batch
from hetmesh.cost import LayerShape, ModuleShape, WeightShape
from hetmesh.errors import HetmeshError
from hetmesh.graph import Activation, BoundarySpec, MediaItem, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.graph.module_graph import ModuleOptions
from hetmesh.layout import MeshSpec
from hetmesh.schedule import POLICIES, PolicyOptions
from hetmesh.simulate import StepModel, simulate
from hetmesh.simulate.fill_bubbles import fill_bubbles

RANKS, PP, LANES, MICROBATCHES, SAMPLES = 16, 4, 2, 8, 16
WIDTHS = {"vision": (27, 1152, 4304, MERGE), "audio": (32, 1280, 5120, AUDIO_MERGE), "llm": (32, 4096, 14336, 1)}
"""Layers, width, inner width, and inputs of an encoder that make one row. SigLIP-so400m, whisper-large-v3, Llama-3.1-8B
with a key head per query head: beside a smaller LLM these encoders fill no gap. Sound attends within windows: its
attention, a tenth of its FLOPs, is left out."""


def _shape(name: str) -> ModuleShape:
    layers, width, inner, merge = WIDTHS[name]
    parts = [("qkv", (3 * width, width), 0), ("o", (width, width), 1)]
    parts += [("up", (inner, width), 0), ("down", (width, inner), 1)]
    attention = {"vision": merge**2 * width, "audio": 0, "llm": width}[name]
    return ModuleShape(
        name,
        tuple(
            LayerShape(
                f"{name}{i}",
                tuple(WeightShape(f"{name}{i}.{part}", shape, merge, tp_dim=dim) for part, shape, dim in parts),
                attention,
                key_width=width,
                causal=name == "llm",
            )
            for i in range(layers)
        ),
    )


def _graph() -> ModuleGraph:
    options = ModuleOptions(activation_checkpoint="full", compute_dtype=torch.bfloat16)
    modules, boundaries = [], []
    for name, slices in (("vision", 9), ("audio", 8)):
        layers = tuple(layer.name for layer in _shape(name).layers)
        size = len(layers) // slices
        modules.append(
            ModuleSpec(
                name,
                MeshSpec.make(range(RANKS), dp_replicate=RANKS),
                layers,
                name,
                features=WIDTHS["llm"][1],
                splits=tuple(layers[i : i + size] for i in range(0, len(layers), size)),
                activation=Activation(WIDTHS[name][1], per_row=WIDTHS[name][3]),
                options=options,
            )
        )
        boundaries.append(BoundarySpec(name, "llm", name))
    layers = tuple(layer.name for layer in _shape("llm").layers)
    size = len(layers) // PP
    llm = ModuleSpec(
        "llm",
        MeshSpec.make(range(RANKS), pp=PP, dp_replicate=LANES, tp=RANKS // PP // LANES),
        layers,
        packed=True,
        splits=tuple(layers[i : i + size] for i in range(0, len(layers), size)),
        activation=Activation(WIDTHS["llm"][1], True),
        options=options,
    )
    return ModuleGraph((*modules, llm), tuple(boundaries))


def _samples(progress: float, seed: int) -> list[SampleMeta]:
    count = SAMPLES * MICROBATCHES
    drawn = mixture(count, np.random.default_rng(seed), progress)
    images, sounds = drawn["vision"][0] // MERGE, drawn["audio"][0] // AUDIO_MERGE
    out = []
    for i, tokens in enumerate(drawn["llm"][0].tolist()):
        rows = {"vision": int(images[i]), "audio": int(sounds[i])}
        media, at = [], 0
        for name, number in rows.items():
            if number:
                media.append(MediaItem(name, (1,), at, number))
                at += number
        out.append(SampleMeta(f"s{i}", int(tokens), tuple(media), ((at + 1, int(tokens)),), rows))
    return out


def drift(batches: int) -> dict[str, Any]:
    """Seconds of a step by the first batch's order over those of 1f1b without filling, and of other orders.

    Raises:
        HetmeshError: the first batch's order fills no gap, so that nothing could become stale.
    """
    graph = _graph()
    shapes = {name: _shape(name) for name in WIDTHS}
    model = StepModel(graph, shapes, machine({"efficiency": 0.46}), sample=4)
    laws = [_samples(i / max(batches - 1, 1), i) for i in range(batches)]
    plans: list[BatchPlan] = [plan_batch(graph, samples, SAMPLES // LANES) for samples in laws]
    options = PolicyOptions(inner="1f1b")
    stale = fill_bubbles(model, plans[0], True, options)
    if stale.actions == fill_bubbles(model, plans[0], True, replace(options, refine=False)).actions:
        raise HetmeshError("optimus: the order of the first batch is the coarse placement: it fills no gap")
    plain = POLICIES["1f1b"](model.stages, plans[0].routes)
    phases = POLICIES["three_phase"](model.stages, plans[0].routes)
    over: dict[str, list[float]] = {name: [] for name in ("plain", "phases", "coarse", "own")}
    for plan in plans[1:]:
        assert plan.routes == plans[0].routes
        costs = model.costs(plan, plain)
        orders = {
            "plain": plain,
            "phases": phases,
            "coarse": fill_bubbles(model, plan, True, replace(options, refine=False)),
            "own": fill_bubbles(model, plan, True, options),
        }
        seconds = simulate(stale, costs).makespan
        for name, schedule in orders.items():
            over[name].append(seconds / simulate(schedule, costs).makespan)
    return {
        "worst": max(over["plain"]),
        "worst_over_rivals": max(map(max, over["phases"], over["coarse"], over["own"])),
        "over_1f1b": over["plain"],
        "over_three_phase": over["phases"],
        "over_coarse": over["coarse"],
        "over_own_order": over["own"],
    }
