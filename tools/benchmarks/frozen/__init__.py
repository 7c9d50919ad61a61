"""Frozen-aware against frozen-blind partition: measured step times on two pinned ranks, and simulated large models.

A frozen encoder, a trainable projector and a trainable LLM make one chain of layers that is cut in two, exactly, by
what each partitioner believes: the blind one that every backward takes twice its forward, the aware one that a frozen
encoder has none (Cornstarch, arXiv 2503.11367, section 4). The encoder's forward takes about 0.85 of the LLM's,
where theory promises 1.5. Both cuts train in the same processes, step by step in turns, each rank on a core of its own;
`speedup_theory` is what 1F1B makes of the FLOPs of the same two cuts. Two busy cores slow each other down, and the
aware cut keeps both busy all the time: by how much is measured between the steps, by plain torch code
(`benchmarks.busy`), and `speedup_expected` is what the simulator makes of the same FLOPs with that slowdown. A cut
without slack also loses a core's every bad moment (other guests of the machine), which one with an idle core makes up
for: so it is the slower of the two that counts in each turn of that measurement.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from analysis.stage_counts import frozen_blind
from benchmarks.busy import BusyMeter, Sizes, blocks, busy_slowdown, pin
from benchmarks.frozen.pairs import simulated
from benchmarks.frozen.stage_costs import Times, makespan
from benchmarks.schedule.recipes import Configuration
from hetmesh.boundary import World
from hetmesh.cost import Rates, computed_work, module_times, partition
from hetmesh.cost.stage_cuts import runs
from hetmesh.data.loader import Loader
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.trainer import Trainer

JUDGES = ("src/hetmesh/cost", "src/hetmesh/schedule", "src/hetmesh/simulate", "src/hetmesh/resolve/splits.py")
"""What an output of it judges (`kept.py`)."""

WARM_UP = 1  # step

BusyRounds = tuple[list[float], list[float]]
"""`BusyMeter.alone` and `together`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each cut (default %(default)s)")
    parser.add_argument("--width", type=int, default=384, help="of encoder and LLM (default %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="of encoder and LLM each (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=32, help="per step (default %(default)s)")
    parser.add_argument("--microbatch", type=int, default=4, help="samples per microbatch (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Cut, predict, train both."""
    sizes = {k: getattr(args, k) for k in ("width", "microbatch", "microbatches")} | {"llm_layers": args.layers}
    plain = Configuration("blind", "1f1b", _tables([], []), 4, vision_trainable=False, text=2, vision_wide=3).recipe(
        **sizes
    )
    times = _times(plain)
    recipes, graphs, cuts = [], [], {}
    for name, blind in (("aware", False), ("blind", True)):
        first, second = _cut(times, blind)
        cuts[name] = [first, second]
        recipe = Configuration(
            name, "1f1b", _tables(first, second), 4, vision_trainable=False, text=2, vision_wide=3
        ).recipe(**sizes)
        recipes.append(recipe)
        graphs.append(resolve(recipe).graph)
    busy = Sizes(args.width, args.width * 11 // 4, layers=args.layers, samples=args.microbatch)
    with WorkerPool(2) as pool:
        results = pool.run(_measure, recipes, args.steps, busy, timeout=900)
    slowdown = busy_slowdown((rounds for _, rounds in results), waiting=True)
    theory, expected = (
        makespan(graphs[1], times, args.microbatches, factors) / makespan(graphs[0], times, args.microbatches, factors)
        for factors in ((), slowdown)
    )
    aware, blind = ([max(step) for step in zip(*(rank[i] for rank, _ in results), strict=True)] for i in range(2))
    ratios = [b / a for a, b in zip(aware, blind, strict=True)]  # of neighbours in time: the machine's speed drifts
    measured = statistics.median(ratios)
    return {
        "speedup_measured": measured,
        "speedup_theory": theory,
        "speedup_expected": expected,
        "speedup_over_expected": measured / expected,
        "busy_slowdown": slowdown[-1],
        "aware_ms": 1e3 * statistics.median(aware),
        "blind_ms": 1e3 * statistics.median(blind),
        "speedups": [round(ratio, 3) for ratio in sorted(ratios)],
        "microbatches": args.microbatches,
        "cuts": cuts,
        "simulated": simulated(),
    }


def _times(recipe: Recipe) -> Times:
    """FLOPs of every layer of the first microbatch, as its seconds on a machine of one FLOP/s."""
    resolved = resolve(recipe)
    graph = resolved.graph
    loader = Loader(resolved.source, recipe.batch.microbatch_size, resolved.expander, seed=recipe.debug.seed)
    samples = [d.meta for d in loader.batch(0)]
    times = {}
    for name, shape in resolved.shapes.items():
        assert shape is not None
        upstream = any(graph.needs_gradient(b) for b in graph.inputs(name))
        times[name] = module_times(shape, computed_work(graph, name, samples), Rates(1.0), upstream=upstream)
    return times


def _cut(times: Times, blind: bool) -> tuple[list[str], list[str]]:
    """The chain in two, each layer as `module/layer`; the projector is part of the LLM's first layer."""
    seen = {
        name: {layer: frozen_blind(time) if blind else time for layer, time in layers.items()}
        for name, layers in times.items()
    }
    units: list[tuple[float, list[str]]] = []
    for name in ("vision", "llm"):
        waiting: list[str] = []  # layers without FLOPs: with the layer after them, the last ones with the one before
        extra = sum(t.forward + t.backward for t in seen["projector"].values()) if name == "llm" else 0.0
        for layer, t in seen[name].items():
            waiting.append(f"{name}/{layer}")
            if cost := t.forward + t.backward:
                units.append((cost + extra, waiting))
                waiting, extra = [], 0.0
        units[-1][1].extend(waiting)
    counts = partition([cost for cost, _ in units], 2)
    first, second = (list(itertools.chain(*run)) for run in runs([names for _, names in units], counts))
    return first, second


def _tables(first: Sequence[str], second: Sequence[str]) -> str:
    """`[parallelism]` of a chain of which rank 0 holds `first` and rank 1 `second`."""
    tables = []
    for module, home in (("vision", 0), ("llm", 1)):
        parts = [[x.partition("/")[2] for x in part if x.startswith(f"{module}/")] for part in (first, second)]
        table = f"[parallelism.{module}]\n"
        if all(parts):
            table += f"ranks = [0, 1]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = {parts}\n"
        else:
            table += f"ranks = [{home}]\n"
        tables.append(table)
    return "\n".join(tables)


def _measure(rank: int, recipes: list[Recipe], steps: int, sizes: Sizes) -> tuple[list[list[float]], BusyRounds]:
    """Seconds of each recipe's steps, in turns, and rounds of plain code; all ranks begin and end a step together."""
    pin(rank)
    meter = BusyMeter(blocks(sizes))
    with tempfile.TemporaryDirectory() as folder:
        trainers = []
        for i, recipe in enumerate(recipes):
            job = recipe.job.model_copy(update={"dump_folder": str(Path(folder, str(i)))})
            trainers.append(Trainer(resolve(recipe.model_copy(update={"job": job})), World.current()))
        seconds: list[list[float]] = [[] for _ in recipes]
        for step in range(WARM_UP + steps):
            for trainer, spent in zip(trainers, seconds, strict=True):
                dist.barrier()
                started = time.perf_counter()
                trainer.train_step()
                if step >= WARM_UP:
                    spent.append(time.perf_counter() - started)
            meter.round()
        for trainer in trainers:
            trainer.reporter.close()
    return seconds, (meter.alone, meter.together)


def table(result: dict[str, Any]) -> str:
    """Measured, theory, and a line per pair."""
    lines = [
        f"measured {result['speedup_measured']:.3f} ({result['blind_ms']:.1f} ms blind, {result['aware_ms']:.1f} ms "
        f"aware), theory {result['speedup_theory']:.3f}, with both cores busy {result['busy_slowdown']:.3f} slower "
        f"{result['speedup_expected']:.3f}: measured over expected {result['speedup_over_expected']:.3f}",
        *(f"{r['pair']:28} llm {r['llm']:8} simulated {r['speedup']:.3f}" for r in result["simulated"]),
    ]
    return "\n".join(lines)
