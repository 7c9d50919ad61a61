"""Layouts of their own against common ones, in real steps on two cores: measured, and predicted before they ran.

Five cases (`cases.py`), of which each gives the LLM's layout as it would be at scale and about a third of the FLOPs to
the encoder: (a) LLM tensor parallel 2: the encoder in the same layout against data parallel 2; (b) LLM pipeline 2: the
encoder in front of the first stage, best cut, against the best of three_phase and bubble_fill (an encoder on ranks of
its own has none of the two left); (c) LLM context parallel 2 with long text: the encoder computed on every rank, which
is what others do and not the best homogeneous layout, against dealt out over the ranks; (d) lengths of chart-16k, (e)
clips of 4 to 512 frames: no balancing against the default.

Of each side several layouts compete: microbatch sizes, cuts, sharded or replicated encoders, schedules. The one that is
predicted to be fastest runs. Predictions are what `hetmesh simulate` says of a recipe with `[profiling] profile` and
`[metrics] machine`, made before any step: the profile is what `hetmesh profile` has just written for the case's common
layout; the machine's links, memory and slowdown of busy cores are measured in two processes.

Both sides train the same samples, step by step in turns, each rank with one thread; the slower rank counts. Ranks are
not pinned to cores: gloo's own threads would then wait for the computation that waits for them. `speedup` is the median
over steps of the ratio of both sides' seconds; in (d) and (e), where lengths differ from step to step, the ratio of the
seconds of all steps. `predicted` is the same of the predicted seconds of the same batches. `scatter` holds the
quartiles of the ratios of single steps. `loss_difference` is the largest relative one in the first steps: that both
sides train the same. `quiet` as in `bench.py schedule`: where it is false, run again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.advantage.cases import CASES, Case, Layout
from benchmarks.advantage.measure import WARM_UP, Turns, machine_file, measure, measure_machine
from benchmarks.busy import Quiet
from hetmesh.cost import Profile, computed_work, module_flops
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import simulate
from hetmesh.testing.pool import WorkerPool

JUDGES = (
    "src/hetmesh/balance",
    "src/hetmesh/boundary",
    "src/hetmesh/cost",
    "src/hetmesh/parallel",
    "src/hetmesh/runtime",
    "src/hetmesh/schedule",
    "src/hetmesh/simulate",
    "src/hetmesh/training/profile.py",
)
"""What an output of it judges (`kept.py`)."""

COMPARED = 2  # batches by which layouts are chosen; where lengths differ, all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE", help="a to e")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each side (default %(default)s)")
    parser.add_argument("--profile-seconds", type=float, default=10.0, help="of a case's layers (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.1, help="of plain code in each round (default %(default)s)")
    parser.add_argument("--smaller", type=int, default=1, help="towers so many times as narrow (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the machine; profile, choose, predict and run each case."""
    rows = []
    with WorkerPool(2) as pool, tempfile.TemporaryDirectory() as folder:
        machine = Path(folder, "machine.toml")
        machine.write_text(machine_file(pool.run(measure_machine, args.rounds, args.seconds, timeout=300)), "utf-8")
        for name in args.only:
            case, profile = CASES[name].smaller(args.smaller), Path(folder, f"{name}.json")
            fitted = measured_profile(case.text(_profiled(case)), profile, args.profile_seconds)
            sides = [
                {each: case.recipe(each, str(machine), str(profile)) for each in layouts}
                for layouts in (case.before, case.after, case.also)
            ]
            batches = range(WARM_UP, WARM_UP + args.rounds)
            some = batches[:COMPARED] if case.items else batches
            guesses = [
                {each: statistics.mean(predicted(recipe, some)) for each, recipe in side.items()} for side in sides
            ]
            chosen = [min(side, key=lambda each: side[each]) for side in guesses[:2]]
            recipes = [side[each] for side, each in zip(sides, chosen, strict=False)]
            ahead = [predicted(recipe, batches) for recipe in recipes]
            turns = pool.run(measure, recipes, args.rounds, args.seconds, timeout=900)
            row = {"case": name, "what": case.what, **_compared(case, chosen, ahead, turns)}
            row |= {
                "encoder_share": encoder_share(recipes[1]),
                "samples": case.samples,
                "profile_error": [fitted.held_out.mean, fitted.held_out.largest],
                "candidates": {each.name: seconds for side in guesses for each, seconds in side.items()},
            }
            rows.append(row)
        text = machine.read_text("utf-8")
    load, noise = (max(row[key] for row in rows) for key in ("background_load", "noise"))
    return {
        "speedup": {row["case"]: row["speedup"] for row in rows},
        "predicted": {row["case"]: row["predicted"] for row in rows},
        "max_prediction_error": max(abs(row["predicted"] / row["speedup"] - 1) for row in rows),
        "quiet": bool(Quiet(load, noise)),
        "background_load": load,
        "noise": noise,
        "machine": text.splitlines(),
        "rows": rows,
    }


def measured_profile(recipe: str, output: Path, seconds: float) -> Profile:
    """What `hetmesh profile` writes to `output` for the text of a recipe."""
    path = output.with_suffix(".toml")
    path.write_text(recipe, "utf-8")
    command = [sys.executable, "-m", "hetmesh", "profile", str(path), "--output", str(output), "--device", "cpu"]
    own = str(Path(__file__).parents[2])  # the recipe names classes of benchmarks
    found = os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [*command, "--seconds", str(seconds)],
        env=os.environ | {"PYTHONPATH": found},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    return Profile.load(output)


def _profiled(case: Case) -> Layout:
    """What `hetmesh profile` is given: the common layout, in microbatches up to the largest, at least four samples."""
    largest = max(each.microbatch for each in (*case.before, *case.after))
    return replace(case.before[0], microbatch=max(largest, 4))


def predicted(recipe: Recipe, batches: Sequence[int]) -> list[float]:
    """Seconds of the steps over some global batches, as `hetmesh simulate` predicts that over the first."""
    resolved = resolve(recipe)
    model, loader = resolved.step_model(), resolved.loader()
    seconds = []
    for batch in batches:
        plan = resolved.plan(loader.batch(batch).metas)
        schedule = resolved.schedules.of(plan)
        seconds.append(simulate(schedule, model.costs(plan, schedule)).makespan)
    return seconds


def encoder_share(recipe: Recipe) -> float:
    """The encoder's part of the FLOPs of the first batch."""
    resolved = resolve(recipe)
    graph, metas = resolved.graph, resolved.loader().batch(0).metas
    flops: dict[str, int] = {}
    for name, shape in resolved.shapes.items():
        assert shape is not None
        upstream = any(graph.needs_gradient(b) for b in graph.inputs(name))
        each = (computed_work(graph, name, [meta]) for meta in metas)  # by itself, so without padding
        flops[name] = sum(module_flops(shape, work, upstream=upstream).total for work in each)
    return flops["vision"] / sum(flops.values())


def _compared(
    case: Case, chosen: Sequence[Layout], ahead: Sequence[Sequence[float]], turns: Sequence[Turns]
) -> dict[str, Any]:
    """The row of a case."""
    real = [[max(each) for each in zip(*(rank.seconds[k] for rank in turns), strict=True)] for k in range(2)]
    ratios = [a / b for a, b in zip(*real, strict=True)]
    quiet = Quiet.of([s for rank in turns for s in rank.busy], [k for rank in turns for k in rank.kept_off])
    losses = zip(*(losses[:WARM_UP] for losses in turns[0].losses), strict=True)
    return {
        "speedup": speedup(case, *real),
        "predicted": speedup(case, *ahead),
        "scatter": statistics.quantiles(ratios, n=4, method="inclusive"),
        "sides": [
            {
                "layout": layout.name,
                "measured_s": statistics.median(seconds),
                "predicted_s": statistics.median(guess),
                "scatter_s": statistics.quantiles(seconds, n=4, method="inclusive"),
                "steps_s": [round(each, 4) for each in seconds],
            }
            for layout, seconds, guess in zip(chosen, real, ahead, strict=True)
        ],
        "loss_difference": max(abs(a - b) / abs(a) for a, b in losses),
        "background_load": quiet.load,
        "noise": quiet.noise,
    }


def speedup(case: Case, before: Sequence[float], after: Sequence[float]) -> float:
    """Of the seconds of the same steps: the median ratio; where steps differ in length, that of all of them."""
    if not case.items:
        return sum(before) / sum(after)
    return statistics.median(a / b for a, b in zip(before, after, strict=True))


def table(result: dict[str, Any]) -> str:
    """Three lines per case."""
    lines = []
    for row in result["rows"]:
        lines.append(f"({row['case']}) {row['what']}; encoder {row['encoder_share']:.0%} of the FLOPs")
        lines += [
            f"    {side['layout']:52} measured {side['measured_s']:6.3f} s   predicted {side['predicted_s']:6.3f} s"
            for side in row["sides"]
        ]
        low, _, high = row["scatter"]
        lines.append(
            f"    speed-up {row['speedup']:.3f} (half of the steps {low:.3f} to {high:.3f}), predicted "
            f"{row['predicted']:.3f}"
        )
    quiet = "quiet enough to judge" if result["quiet"] else "NOT quiet enough to judge: run it again"
    return "\n".join(
        [*lines, f"{quiet} (background load {result['background_load']:.1%}, noise {result['noise']:.1%})"]
    )
