"""Published training runs of other frameworks: predicted step time and memory against them, beside FLOPs alone.

    python tools/bench.py cards                     # 44 runs on H100 (cards.csv)
    python tools/bench.py cards --rows FILE.csv     # another table with the same columns

Every run is predicted by the predictor that decides in `hetmesh plan`, with the machine file as it is: no constant
knows these rows, and none was changed after errors were seen (`run_predictions.py` has those that no file has); two
terms were added (`README.md`). Models are built at their published sizes (`llm_sizes.py`); one that is not known by
name is shaped by `params_total_b` and `params_active_b`, and said. Beside it stands a predictor that knows nothing
else: 6 FLOPs per active parameter and token at 40% of the peak (`trivial`), and the same at the rate that suits these
rows best (`trivial_fitted`).

Repeats of a run, whose rows differ in nothing that it is predicted from, count once, by the mean of their steps
(`every_row` counts each). A step error is |predicted / published - 1|. Rows that cannot be modelled and columns that
mean nothing here are named in `left_out`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.cards.published_runs import CARDS, PublishedRun, read_runs
from benchmarks.cards.run_predictions import (
    ENCODER,
    IMAGE_SHARE,
    SAMPLE_TOKENS,
    UTILIZATION,
    PredictedRun,
    predict_run,
)
from benchmarks.planner.agreement import best_factor, mean_error, rank_correlation
from hetmesh.cost import load_machine
from hetmesh.errors import HetmeshError

JUDGES = (
    *("src/hetmesh/cost", "src/hetmesh/schedule", "src/hetmesh/simulate", "src/hetmesh/planner"),
    "tools/benchmarks/planner/architectures.py",
)
"""What an output of it judges (`kept.py`)."""

NOT_MODELLED = (
    "what overlaps with what: sums of gradients, FSDP's gathers, tensor parallelism's sums and the exchange of tokens "
    "between experts count in full, as hetmesh runs them",
    "kernels: all products run at the machine's efficiency, measured on large dense ones, those of small experts, too; "
    "permutations of tokens and CUDA graphs do not count; the host launches as many operations as modules of "
    "transformers and hetmesh's experts have, each in the time that it took in a plain loop on an H100",
    "routing: every expert gets as many tokens as any other",
    "attention of packed samples: it counts as if every sequence were one",
    "multi-token prediction, dropout, data, checkpoints",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rows", type=Path, default=CARDS, metavar="FILE.csv", help="published runs")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Predict all rows."""
    runs, left_out = read_runs(args.rows)
    known: dict[tuple, PredictedRun | HetmeshError] = {}
    pairs = []
    for each in runs:
        found = known.get(each.inputs) or _predicted(each)
        known[each.inputs] = found
        if isinstance(found, PredictedRun):
            pairs.append((each, replace(found, said=(*each.read_as, *found.said))))
        else:
            left_out.append(f"{each.where}: {found}")
    if not pairs:
        raise HetmeshError(f"{args.rows}: no row can be predicted: {'; '.join(left_out)}")
    counted = _once(pairs)
    lora, full = ([pair for pair in counted if pair[0].lora == which] for which in (True, False))
    shared, whole = ([pair for pair in counted if (pair[0].cp > 1) == which] for which in (True, False))
    fullest = [(p.memory.tensors, r.peak_bytes) for r, p in pairs if r.peak_bytes is not None]
    factor = best_factor([p.trivial_s for _, p in counted], [r.step_s for r, _ in counted])
    machines = sorted({r.machine for r, _ in pairs})
    return {
        "table": args.rows.name,
        "rows_read": len(pairs),
        "runs": len(counted),
        **_errors(counted),
        "trivial": {"utilization": UTILIZATION, **_errors(counted, _trivially(counted, 1.0))},
        "trivial_fitted": {"utilization": UTILIZATION / factor, **_errors(counted, _trivially(counted, factor))},
        "every_row": _errors(pairs) | {"trivial": _errors(pairs, _trivially(pairs, 1.0))},
        "memory_rows": len(fullest),
        "memory_error": mean_error(*map(list, zip(*fullest, strict=True))) if fullest else None,
        "lora": _group(lora),
        "full": _group(full),
        "context_parallel": _group(shared),
        "without_context_parallel": _group(whole),
        "lora_over_full": _lora_over_full(counted),
        "left_out": left_out,
        "not_modelled": list(NOT_MODELLED),
        "constants": {
            "vlm encoder": ENCODER.like,
            "image share": IMAGE_SHARE,
            "tokens of a packed sample": SAMPLE_TOKENS,
        }
        | {m: _constants(m) for m in machines},
        "rows": [_row(r, p) for r, p in pairs],
    }


Pairs = Sequence[tuple[PublishedRun, PredictedRun]]


def _predicted(run: PublishedRun) -> PredictedRun | HetmeshError:
    try:
        return predict_run(run)
    except HetmeshError as error:
        return error


def _once(pairs: Pairs) -> Pairs:
    """Each run once, at the mean of its published steps."""
    of: dict[tuple, list[tuple[PublishedRun, PredictedRun]]] = {}
    for pair in pairs:
        of.setdefault(pair[0].inputs, []).append(pair)
    return [(replace(same[0][0], step_s=mean(r.step_s for r, _ in same)), same[0][1]) for same in of.values()]


def _trivially(pairs: Pairs, factor: float) -> list[float]:
    return [factor * p.trivial_s for _, p in pairs]


def _errors(pairs: Pairs, predicted: Sequence[float] | None = None) -> dict[str, Any]:
    published = [r.step_s for r, _ in pairs]
    steps = [p.step_s for _, p in pairs] if predicted is None else predicted
    return {
        "mean_step_error": mean_error(steps, published),
        "worst_step_error": max(abs(a / b - 1) for a, b in zip(steps, published, strict=True)),
        "rank_correlation": rank_correlation(steps, published),
    }


def _group(pairs: Pairs) -> dict[str, Any]:
    if not pairs:
        return {"runs": 0}
    ratios = sorted(p.step_s / r.step_s for r, p in pairs)
    trivial = _errors(pairs, _trivially(pairs, 1.0))
    return {"runs": len(pairs), **_errors(pairs), "median_predicted_over_published": ratios[len(ratios) // 2]} | {
        "trivial": trivial
    }


def _lora_over_full(pairs: Pairs) -> list[dict[str, Any]]:
    """Of models that were trained both ways on sequences of one length: mean GPU seconds of a token with LoRA over
    those without. Layouts and batches differ, so the ratio is not what LoRA alone gains."""
    of: dict[tuple[str, int], dict[bool, list[tuple[float, float]]]] = {}
    for r, p in pairs:
        token = r.gpus / (r.tokens * r.global_batch)
        ways = of.setdefault((r.model, r.tokens), {True: [], False: []})
        ways[r.lora].append((r.step_s * token, p.step_s * token))
    return [
        {"model": model, "tokens": tokens, "published": ratios[0], "predicted": ratios[1]}
        for (model, tokens), ways in of.items()
        if all(ways.values())
        for ratios in [[mean(each[i] for each in ways[True]) / mean(each[i] for each in ways[False]) for i in (0, 1)]]
    ]


def _constants(machine: str) -> dict[str, float]:
    own, keys = load_machine(machine), ("efficiency", "memory_bandwidth", "node_bandwidth", "network_bandwidth")
    return {key: getattr(own, key) for key in (*keys, "operation_overhead", "launch_overhead")}


def _row(run: PublishedRun, found: PredictedRun) -> dict[str, Any]:
    return {
        "id": run.id,
        "published_s": run.step_s,
        "predicted_s": found.step_s,
        "trivial_s": found.trivial_s,
        "published_peak_bytes": run.peak_bytes,
        "predicted_peak_bytes": found.memory.tensors,
        "said": list(found.said),
    }


def table(result: dict[str, Any]) -> str:
    """Rows and figures as lines."""
    lines = [f"{'seconds of a step':62}{'predicted':>10}{'published':>10}{'ratio':>7}{'FLOPs alone':>12}"]
    for row in result["rows"]:
        ratio = row["predicted_s"] / row["published_s"]
        numbers = f"{row['predicted_s']:>10.2f}{row['published_s']:>10.2f}{ratio:>7.2f}{row['trivial_s']:>12.2f}"
        lines.append(f"{row['id']:62}{numbers}")
        lines += [f"  {each}" for each in row["said"]]
    lines.append("")
    for name, own in (("predicted", result), *((key, result[key]) for key in ("trivial", "trivial_fitted"))):
        at = f", at {own['utilization']:.2f} of the peak" if "utilization" in own else ""
        lines.append(f"{name}: {_said(own)}{at}")
    groups = ("full", "lora", "context_parallel", "without_context_parallel")
    lines += [f"{key}, {result[key]['runs']} runs: {_said(result[key])}" for key in groups if result[key]["runs"]]
    for each in result["lora_over_full"]:
        ratios = f"{each['predicted']:.2f} predicted, {each['published']:.2f} published"
        lines.append(f"{each['model']} at {each['tokens']}, GPU seconds of a token, LoRA over full: {ratios}")
    error = result["memory_error"]
    lines.append(f"peak memory of {result['memory_rows']} rows: {'-' if error is None else f'{error:.1%} off'}")
    lines.append(f"{result['rows_read']} rows, {result['runs']} runs")
    lines += [f"left out: {each}" for each in result["left_out"]]
    return "\n".join([*lines, *(f"not modelled: {each}" for each in result["not_modelled"])])


def _said(own: dict[str, Any]) -> str:
    rank = own["rank_correlation"]
    errors = f"mean error {own['mean_step_error']:.2f}, worst {own['worst_step_error']:.2f}"
    return f"{errors}, rank correlation {'-' if rank is None else f'{rank:.2f}'}"
