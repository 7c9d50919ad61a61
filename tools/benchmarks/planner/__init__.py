"""The planner's predictions against published steps, and how long its search takes.

    python tools/bench.py planner                     # table A2 of arXiv 2605.27678, 21 rows
    python tools/bench.py planner --rows FILE.csv     # another table with the same columns

Both layouts of every row are predicted by the predictor that decides in `hetmesh plan`, with the machine file as it is,
shapes of models chosen by size (`architectures.py`), and settings that are those of the measured framework as far as
they are published (`row_predictions.OPTIONS`): no constant knows these rows. Beside them are two predictors
that know next to nothing and are fitted on the rows, what the same predictions would be at one factor fitted on them,
and the layout that the planner would have taken.

A file may also have the columns `seq` (8192), `global_batch` (288 on 72 GPUs, else one sample per GPU), `microbatches`
(one sample per lane each), `placement` (`colocated`, or `disjoint`: the colocated columns then hold disjoint layouts),
`gpus_other` (all GPUs of the second layout) and `phase` (`forward_backward`: steps are without the optimizer and its
communication). Other columns, and rows of layouts that cannot be laid out or run, are left out and named (`left_out`).

`planned_over_best` and `baseline_over_published` are of ViT-22B + GPT-175B on 1,536, 2,048 and 3,072 GPUs
(`strong_scaling.py`).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planner.agreement import (
    best_factor,
    correlation,
    mean_error,
    rank_correlation,
    sign_accuracy,
    trivial,
)
from benchmarks.planner.architectures import decoder, described, encoder
from benchmarks.planner.further_predictions import crossover, long_context
from benchmarks.planner.megatron_bytes import megatron_bytes
from benchmarks.planner.peaks import memory_remarks, other_predictions, peak_agreement
from benchmarks.planner.published_rows import REFERENCE, Row, read_rows, unknown_columns
from benchmarks.planner.row_predictions import RECOMPUTED, Predicted, predict_row, row_problem
from benchmarks.planner.search_seconds import BATCHES, search_seconds
from benchmarks.planner.sharded_state import sharded_state
from benchmarks.planner.strong_scaling import scaling_lines, strong_scaling
from benchmarks.planner.unexplained import OF_ALL_ROWS, unexplained
from hetmesh.cost import MACHINES, load_machine
from hetmesh.errors import HetmeshError
from hetmesh.planner import search
from hetmesh.planner.predict import batch_flops

LAYOUTS = "homogeneous", "second"
JUDGES = ("src/hetmesh/cost", "src/hetmesh/schedule", "src/hetmesh/simulate", "src/hetmesh/planner")
"""What an output of it judges (`kept.py`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rows", type=Path, default=REFERENCE, metavar="FILE.csv", help="published rows")
    parser.add_argument("--machine", default="h100", help=f"one of {', '.join(MACHINES)}, or a TOML file")
    parser.add_argument("--quick", action="store_true", help="predictions of the rows alone: no search, no other cases")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Predict all rows, then search."""
    rows, found, left_out = list[Row](), list[tuple[Predicted, Predicted]](), list[str]()
    for row in read_rows(args.rows):
        try:
            found.append(predict_row(row, args.machine))
            rows.append(row)
        except HetmeshError as error:
            left_out.append(f"{row.model} on {row.gpus[0]} GPUs: {error}")
    if not rows:
        raise HetmeshError(f"{args.rows}: no row can be predicted: {'; '.join(left_out)}")
    machine = load_machine(args.machine)
    result = {"table": args.rows.name, "machine": args.machine} | _agreement(rows, found, machine.memory_bytes)
    result["left_out"] = [*(f"column {name}" for name in unknown_columns(args.rows)), *left_out]
    result["memory"] = other_predictions(rows, args.machine)
    result["constants"] = {
        key: getattr(machine, key)
        for key in ("efficiency", "memory_bandwidth", "node_bandwidth", "network_bandwidth", "operation_overhead")
    }
    sizes = [described(encoder(s)) for s in sorted({row.encoder for row in rows})]
    result["architectures"] = [*sizes, *(described(decoder(s)) for s in sorted({row.llm for row in rows}))]
    if not args.quick:
        for row, each in zip(rows, result["rows"], strict=True):
            each["own_best"] = _own_best(row, each, args.machine)
        seconds = {ranks: search_seconds(ranks) for ranks in BATCHES}
        scaling = strong_scaling()
        result |= {f"search_s_{ranks}": each["search_s"] for ranks, each in seconds.items()}
        result["search_s_3072"] = max(result["search_s_3072"], scaling["3072"]["search_s"])  # the slower recipe
        for key in ("planned_over_best", "baseline_over_published"):
            result[key] = {gpus: each[key] for gpus, each in scaling.items()}
        result["searches"] = list(seconds.values())
        result["strong_scaling"] = scaling
        result["sharded_state"] = sharded_state()
        result["zero1_step_over_replicas"] = result["sharded_state"]["step_over_replicas"]
        result["long_context"] = long_context(args.machine)
        result["crossover_120B"] = crossover(args.machine)
    return result


def _agreement(rows: list[Row], found: list[tuple[Predicted, Predicted]], limit: int) -> dict[str, Any]:
    published = [step for row in rows for step in row.steps]
    steps = [each.step_s for pair in found for each in pair]
    gains = [_gain(row, a.step_s, b.step_s) for row, (a, b) in zip(rows, found, strict=True)]
    flops = [sum(batch_flops(row_problem(row)).values()) for row in rows]
    plain = trivial(flops, [row.steps for row in rows], [row.gpus for row in rows], [row.gain for row in rows])
    error, factor = mean_error(steps, published), best_factor(steps, published)
    remarks = unexplained(rows, gains)
    memory = peak_agreement(rows, [[each.memory.total for each in pair] for pair in found], limit)
    wanted = [row.gain for row in rows]
    return {
        "mean_step_error": error,
        "step_error_over_trivial": error / plain["mean_step_error"] if plain["mean_step_error"] else None,
        "gain_error_points": sum(abs(a - b) for a, b in zip(gains, wanted, strict=True)) / len(rows),
        "rank_correlation": rank_correlation(steps, published),
        "gain_sign_accuracy": sign_accuracy(gains, wanted),
        "gain_correlation": correlation(gains, wanted),
        "gain_rank_correlation": rank_correlation(gains, wanted),
        **memory,
        "trivial": plain,
        "one_factor_fitted": {
            "factor": factor,
            "mean_step_error": mean_error([factor * step for step in steps], published),
        },
        "not_known": list(OF_ALL_ROWS),
        "rows": [
            _row(row, pair, gain, said) for row, pair, gain, said in zip(rows, found, gains, remarks, strict=True)
        ],
    }


def _gain(row: Row, first: float, second: float) -> float:
    return 100 * (first * row.gpus[0] / (second * row.gpus[1]) - 1)


def _row(row: Row, pair: tuple[Predicted, Predicted], gain: float, remarks: list[str]) -> dict[str, Any]:
    layouts = {
        name: {
            "published_s": row.steps[i],
            "predicted_s": each.step_s,
            "published_peak_bytes": row.peaks[i],
            "predicted_peak_bytes": each.memory.total,
            "peak_of": {name: size for name, size in each.memory.parts.items() if size},
            "at": each.memory.at,
            "megatron_bytes": megatron_bytes(row, i, row.encoder > RECOMPUTED),
            "memory_remarks": memory_remarks(row, i, each.memory.total),
            "mean_rank_s": dict(each.parts),
        }
        for i, (name, each) in enumerate(zip(LAYOUTS, pair, strict=True))
    }
    sizes = {"model": row.model, "vision_percent": 100 * row.vision, "gpus": row.gpus[0]}
    return {**sizes, "published_gain": row.gain, "predicted_gain": gain, **layouts, "not_known": remarks}


def _own_best(row: Row, each: dict[str, Any], machine: str) -> dict[str, Any] | None:
    found = search(replace(row_problem(row, machine), ranks=row.gpus[0]), shown=1)
    if found.fastest is None:
        return None
    best = found.fastest
    gain = 100 * (each["homogeneous"]["predicted_s"] / best.step_s - 1)
    fits = {name: plans[0].step_s for name, plans in found.best.items() if plans}
    return {"layout": str(best.plan), "step_s": best.step_s, "gain_percent": gain, "best_step_s": fits}


def table(result: dict[str, Any]) -> str:
    """Rows and figures as lines."""
    lines = [f"{'':16}{'homogeneous s':>18}{'second s':>18}{'gain %':>14}{'peak GB':>24}"]
    lines += [
        f"{'model, vision %':16}{'pred.   publ.':>18}{'pred.   publ.':>18}{'pred.  publ.':>14}{'pred. / publ.':>24}"
    ]
    for row in result["rows"]:
        pair = row["homogeneous"], row["second"]
        steps = "".join(f"{each['predicted_s']:>10.2f}{each['published_s']:>8.2f}" for each in pair)
        peaks = "  ".join(
            f"{each['predicted_peak_bytes'] / 1e9:.0f}/{(each['published_peak_bytes'] or 0) / 1e9:.0f}" for each in pair
        )
        name = f"{row['model']} {row['vision_percent']:g}"
        lines.append(f"{name:16}{steps}{row['predicted_gain']:>7.1f}{row['published_gain']:>7.1f}{peaks:>24}")
        if best := row.get("own_best"):
            lines.append(f"  own best: {best['step_s']:.2f} s, {best['layout']}")
        lines += [f"  not known: {each}" for each in row["not_known"]]
        lines += [f"  memory, {name}: {each}" for name in LAYOUTS for each in row[name]["memory_remarks"]]
    plain, fitted = result["trivial"], result["one_factor_fitted"]
    lines += [
        "",
        f"mean step error {result['mean_step_error']:.3f} ({fitted['mean_step_error']:.3f} with one factor fitted on "
        f"these rows, {fitted['factor']:.2f}; FLOPs alone, fitted on them: {plain['mean_step_error']:.3f})",
        f"gains: {result['gain_error_points']:.1f} points off (always {plain['gain_percent']:g}%: "
        f"{plain['gain_error_points']:.1f}), right side of zero {result['gain_sign_accuracy']:.2f} "
        f"({plain['gain_sign_accuracy']:.2f})",
        f"rank correlation of steps {_number(result['rank_correlation'])}, of gains "
        f"{_number(result['gain_rank_correlation'])}; peak memory off by {_number(result['peak_memory_error'])}, "
        f"{_number(result['fits_80gb_share'])} of the layouts within the machine's",
        "otherwise: " + "; ".join(_said(name, each) for name, each in result["memory"].items()),
    ]
    lines += [f"left out: {each}" for each in result["left_out"]]
    for each in result.get("searches", ()):
        lines.append(
            f"search of {each['recipe']} on {each['ranks']} ranks: {each['search_s']:.1f} s, "
            f"{each['considered']} layouts"
        )
    lines += scaling_lines(result.get("strong_scaling", {}))
    if state := result.get("sharded_state"):
        steps, peaks = state["step_s"], state["peak_bytes"]
        lines.append(
            f"ZeRO-1 over the replicas of {state['recipe']}: {state['step_over_replicas']:.3f} of the step without, "
            f"{steps['zero1']:.3f} against {steps['replicas']:.3f} s; {peaks['zero1'] / 1e9:.0f} against "
            f"{peaks['replicas'] / 1e9:.0f} GB"
        )
    for each in result.get("long_context", ()):
        gains = ", ".join(f"{name}: {gain:+.1f}%" for name, gain in each["gain_percent"].items())
        lines.append(f"64K tokens, {each['vision_percent']:g}% vision, colocated + CP over homogeneous: {gains}")
    if "crossover_120B" in result:
        lines.append(
            f"disjoint ahead from {result['crossover_120B']['disjoint_ahead_from_billions']}B with an LLM of 120B"
        )
    return "\n".join(lines)


def _said(name: str, figures: dict[str, Any]) -> str:
    return f"{name} off by {_number(figures['peak_memory_error'])}, {_number(figures['fits_80gb_share'])} within"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
