"""Folders as runs leave them, without any training: metrics of made-up steps, a simulated step, a recipe."""

import json
import math

from hetmesh.balance.imbalance import BatchLoad, ModuleLoad
from hetmesh.cost import StageCost, StepCosts
from hetmesh.graph import Activation, ModuleGraph, ModuleSpec, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.recipe.recipe import load_recipe
from hetmesh.records.metrics import Measured, StepCost, StepLoad, StepMetrics
from hetmesh.schedule import zero_bubble
from hetmesh.simulate import simulate

BEGAN = 1.8e9
"""When runs began, seconds since 1970."""


def write_lines(path, values):
    """A JSON value per line."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def timeline(name="llm"):
    """Zero bubble over two stages, four microbatches, forward 1 ms."""
    layers = ("a", "b")
    llm = ModuleSpec(
        name, MeshSpec.make(range(2), pp=2), layers, splits=(("a",), ("b",)), activation=Activation(1, True)
    )
    schedule = zero_bubble(stage_graph(ModuleGraph((llm,))), 4)
    costs = {(s, m): StageCost(1e-3, 1e-3, 1e-3) for s in schedule.stages.stages for m in range(4)}
    return simulate(schedule, StepCosts(costs))


def metrics(step, name="llm"):
    """Of one step; every second one is logged."""
    boundary = f"vision->{name}"
    measured = Measured(
        10**9 + step,
        2,
        2,
        {boundary: {"forward": 4096, "backward": 2048}},
        {boundary: 0.01},
        {"bytes_read": 300, "bytes_needed": 200, "bytes_read_most": 200, "wait_s": 0.02},
        {name: {"max_over_mean": 1 + 1 / step, "without_tokens": 0, "balance_loss": 2.1}},
    )
    load = StepLoad(BatchLoad({name: ModuleLoad(1.5, 0.25, 0.4)}, 0), BatchLoad({name: ModuleLoad(1.1, 0.1, 0.3)}, 0))
    return StepMetrics(
        step,
        loss=3 * math.exp(-step / 9),
        grad_norm=2 / step,
        lr=1e-3,
        samples_per_s=64.0,
        tokens_per_s=1000.0 + 10 * step,
        time_s=1.0 if step > 1 else 9.0,
        cost=StepCost({name: 10**9}, {name: 0.3}, 0.3, {name: 1.0}),
        measured=measured if step % 2 == 0 else None,
        load=load if step % 2 == 0 else None,
    )


def write_run(folder, recipe, *, steps=30, name="llm", description=None):
    """A finished run of `recipe` in `folder`, which is made; `name` of the module that metrics and timeline tell of."""
    folder.mkdir(parents=True, exist_ok=True)
    overrides = ["--training.steps", str(steps), "--metrics.machine", "h100"]
    told = load_recipe(recipe, overrides).model_dump(mode="json", by_alias=True)
    if description is not None:
        told["job"]["description"] = description
    (folder / "recipe.json").write_text(json.dumps(told))
    ended = [BEGAN + 4 + sum(metrics(i).time_s for i in range(1, step + 1)) for step in range(steps + 1)]
    lines = [metrics(step, name).record() | {"timestamp": ended[step]} for step in range(1, steps + 1)]
    for step in range(10, steps + 1, 10):
        found = {"loss": 3 - step / 30, "answer_accuracy": step / 100, "samples": 8, "time_s": 0.5}
        lines.insert(step + step // 10 - 1, {"step": step, "timestamp": ended[step], "validation": found})
    write_lines(folder / "metrics.jsonl", lines)
    saved = {"event": "checkpoint", "step": steps, "timestamp": ended[-1], "held_s": 1, "time_s": 2}
    end = {"event": "ended", "step": steps, "timestamp": ended[-1] + 1, "how": "finished"}
    start = {"event": "started", "step": 0, "timestamp": BEGAN, "steps": steps, "host": "a", "ranks": 2}
    write_lines(folder / "events.jsonl", [start | {"device": "cpu"}, saved, end])
    summary = {"steps": steps, "ranks": 2, "validation_loss": 1.5, "answer_accuracy": 0.25, f"of {name}": {"add": 0.5}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "answers.json").write_text(json.dumps({"how": "token by token", "text": f"  ##\n  @@  \nQ: {name}"}))
    step = timeline(name).as_json()
    (folder / "timeline.json").write_text(json.dumps({"step": 2, "predicted": step, "measured": step}))
    return folder
