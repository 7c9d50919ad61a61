"""How many graphs torch.compile makes: of blocks under each activation checkpointing, of flex_attention by heads."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

import hetmesh
from gpu_checks.flex import FLEX, MASKS, WINDOWS, Case, Heads
from gpu_checks.found import Found, Place
from hetmesh.attention import flex
from hetmesh.parallel.compile import missing_compiler
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"
MODES = {"cuda": ("none", "selective", "full"), "cpu": ("none", "full")}
STEPS = 3
AGREE = 1e-4
"""Relative difference of losses in float32: what is fused is rounded otherwise."""
GRAPHS_OF_HEADS = 4
"""Of one head configuration: with and without gradients, and at most one more each where a size is 1 or equal to
another."""


def run(place: Place) -> Found:
    """Blocks of both towers in real steps, and the attention of two head configurations."""
    place.need_kernels("compiled blocks")
    device = "cuda" if place.on_gpu else "cpu"
    lacks = missing_compiler("inductor", device)
    backend = "inductor" if place.on_gpu and lacks is None else "aot_eager"
    plain = steps(device, {})["losses"]
    compiled: dict[str, Any] = {}
    for mode in MODES[device]:
        keys = {"compile.enable": "true", "compile.backend": f'"{backend}"', "activation_checkpoint.mode": f'"{mode}"'}
        compiled[mode] = steps(device, keys)
        print("blocks, checkpointing {}: {graphs} graphs, {breaks} breaks".format(mode, **compiled[mode]), flush=True)
    graphs = [each["graphs"] for each in compiled.values()]
    per_heads = flex_graphs(torch.device(device))
    print(f"flex_attention: {per_heads} graphs per head configuration", flush=True)
    figures = {
        "backend": backend,
        "blocks": compiled,
        "modes_that_compile_nothing": sum(n == 0 for n in graphs),
        "graphs_more_by_checkpointing": max(graphs) - graphs[0],
        "graph_breaks": max(each["breaks"] for each in compiled.values()),
        "graphs_in_last_step": max(each["in_last_step"] for each in compiled.values()),
        "loss_difference": max(
            abs(a - b) / abs(b) for each in compiled.values() for a, b in zip(each["losses"], plain, strict=True)
        ),
        "flex_graphs": per_heads,
        "most_flex_graphs": max(per_heads),
    }
    left_out = {}
    if backend != "inductor":
        left_out["inductor"] = lacks or "on a CPU graphs are traced and counted, and not compiled: it takes minutes"
    if not place.on_gpu:
        left_out["flex's backward"] = "flex_attention has it on CUDA alone"
    none = dict.fromkeys(
        ("modes_that_compile_nothing", "graphs_more_by_checkpointing", "graph_breaks", "graphs_in_last_step"), 0
    )
    return Found(figures, {**none, "loss_difference": AGREE, "most_flex_graphs": GRAPHS_OF_HEADS}, left_out)


def steps(device: str, keys: dict[str, str]) -> dict[str, Any]:
    """Losses of a few steps in one process, and the graphs that were made of its blocks."""
    torch._dynamo.reset()
    counters.clear()
    with tempfile.TemporaryDirectory() as folder:
        given = {
            **keys,
            "job.dump_folder": folder,
            "training.local_batch_size": 8,
            "metrics.enable_tensorboard": "false",
        }
        world = hetmesh.init(device=device)
        trainer = Trainer(resolve(load_recipe(RECIPE, [f"--{key}={value}" for key, value in given.items()])), world)
        losses, graphs = [], []
        try:
            for _ in range(STEPS):
                losses.append(trainer.train_step().loss)
                graphs.append(counters["stats"]["unique_graphs"])
        finally:
            trainer.upcoming.close()
            trainer.reporter.close()
            world.close()
    breaks = sum(counters["graph_break"].values())
    return {"graphs": graphs[-1], "in_last_step": graphs[-1] - graphs[-2], "breaks": breaks, "losses": losses}


def flex_graphs(device: torch.device) -> list[int]:
    """Graphs of each head configuration, for several masks and sizes; over dynamo's limit is an error."""
    torch._dynamo.reset()
    counters.clear()
    made = []
    for heads in (Heads(8, 2, 64), Heads(4, 4, 32)):
        before = counters["stats"]["unique_graphs"]
        with mock.patch.object(flex, "_kernel", _traced) if device.type == "cpu" else nullcontext():
            for mask, window in zip(MASKS.values(), WINDOWS, strict=True):
                Case(heads, mask, window, device, device.type == "cuda").error(FLEX, torch.float32)
        made.append(counters["stats"]["unique_graphs"] - before)
    return made


_kernels: dict[tuple[object, ...], Any] = {}


def _traced(_device: str, *kind: object) -> Any:
    """What flex.py compiles for CUDA, traced: it runs uncompiled on a CPU, where there would be nothing to count."""
    return _kernels.setdefault(kind, flex.compiled_kernel("eager"))
