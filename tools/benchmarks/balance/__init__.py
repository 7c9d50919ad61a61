"""How even every balancer makes microbatches, and what a 1F1B step gains over no balancing, law by law.

4 lanes of 32 microbatches with 2 and with 4 samples each; every module on 4 pipeline stages of its own, as large as it
needs to be (a static plan). Steps are as long as the recurrence of `hetmesh.balance.step_lengths` says, which is held
against the simulator here (`simulator_difference`). `gain` is throughput over that of `none`; `over bound` the largest
microbatch over the larger of the mean one and the largest sample, the mean over batches. `auto_worst_regret`: by how
much the best of the others is faster, which is 0 by construction, since `auto` tries the others and decides by this
length. `auto_worst_regret_unseen` is by how much the best of the others is faster by costs that no balancer has seen:
each sample's work in each module times a factor drawn around 1 (`UNSEEN`).

The keys are of `auto` in a recipe with `microbatches = "free"`, which is not the default, and deferral, which by
default is on only where simulated steps say so: it may choose another number than 32; `none` and all others always have
the 32. `..._default` are the keys of `auto` with 32 microbatches and no deferral. `..._fixed` are those of `auto` with
32 microbatches and deferral, and so are the standard deviations, which say nothing between microbatches of other sizes.
In 32 some laws cannot be even: `unavoidable_over_bound` says that some microbatch must hold two of the 129 largest
samples, three of the 257 largest, and so on; `worst_over_unavoidable` is the worst of `auto` with 32 over that, of all
modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.balance.against_simulator import difference
from benchmarks.balance.cases import Case, file_law
from benchmarks.balance.compare import BALANCERS, OURS, compare
from benchmarks.balance.fitted import FITTED, HELD_OUT, SLOWER, against_published
from benchmarks.balance.laws import CHARTS, LAWS
from benchmarks.balance.timing import LARGE, SMALL, assign_ms

JUDGES = (
    "src/hetmesh/balance",
    "src/hetmesh/cost/layer_time.py",
    "src/hetmesh/cost/shapes.py",
    "src/hetmesh/cost/work.py",
)
"""What an output of it judges (`kept.py`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--lengths", type=Path, metavar="FILE.jsonl", help="samples of your own instead of the laws")
    parser.add_argument("--only", nargs="+", metavar="LAW", help="some of the laws")
    parser.add_argument("--batches", type=int, default=6, help="of each law and size (default %(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="of each balancer that is timed (default %(default)s)")
    parser.add_argument("--size", type=int, nargs="+", default=[2, 4], help="samples per microbatch (default 2 4)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compare on every law, then time."""
    cases = _cases(args)
    laws = [compare(case, size, args.batches) for case in cases for size in args.size]
    fitted = [case for case in cases if case.name in FITTED]
    timed = next((case for case in cases if case.name == CHARTS[0]), cases[0])
    result = {
        **_evenness(laws),
        **_throughput(laws),
        "assign_ms_4096": assign_ms(timed, "two_dim", *SMALL, runs=args.runs),
        "auto_ms_4096": assign_ms(timed, "auto", *SMALL, runs=args.runs, deferral=True, free=True),
        "auto_ms_4096_fixed": assign_ms(timed, "auto", *SMALL, runs=args.runs, deferral=True),
        "assign_ms_65536": assign_ms(timed, "two_dim", *LARGE, runs=max(args.runs // 3, 1)),
        "simulator_difference": max(difference(case) for case in cases),
        "batches": args.batches,
        "published": {case.name: against_published(case, args.batches) for case in fitted},
        "published_held_out": {case.name: _held_out(case.name, args.batches) for case in fitted},
    }
    return result | {"laws": laws}


def _held_out(name: str, batches: int) -> dict[str, dict[str, float]]:
    return against_published(Case.of(name, HELD_OUT[name], SLOWER), batches)


def _cases(args: argparse.Namespace) -> list[Case]:
    if args.lengths:
        return [Case.of(args.lengths.stem, file_law(args.lengths))]
    cases = [Case.of(name, law) for name, law in LAWS.items()]
    cases += [Case.of(name, law, SLOWER) for name, law in FITTED.items()]
    names = [case.name for case in cases]
    if unknown := sorted(set(args.only or ()) - set(names)):
        raise SystemExit(f"--only {' '.join(unknown)}: the laws are {', '.join(names)}")
    return [case for case in cases if not args.only or case.name in args.only]


def _of(law: Mapping[str, Any], balancer: str = "auto") -> Mapping[str, Any]:
    return law["balancers"][balancer]


def _evenness(laws: list[dict[str, Any]]) -> dict[str, Any]:
    chart = [law for law in laws if law["law"] == CHARTS[0] and law["samples_per_microbatch"] == 4]
    reduction = _of(chart[0])["std_reduction"] if chart else {}
    out: dict[str, Any] = {
        "encoder_std_reduction_chart4k": reduction.get("vision"),
        "llm_std_reduction_chart4k": reduction.get("llm"),
    }
    for suffix, balancer in OURS.items():
        each = [list(_of(law, balancer)["over_bound"].values()) for law in laws]
        out[f"worst_over_bound_encoder{suffix}"] = _largest(value for values in each for value in values[:-1])
        out[f"worst_over_bound_llm{suffix}"] = _largest(values[-1] for values in each)
    over = [[_of(law)["over_bound"][m] / least for m, least in law["unavoidable_over_bound"].items()] for law in laws]
    out["worst_over_unavoidable"] = _largest(value for values in over for value in values)
    return out


def _throughput(laws: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for suffix, balancer in OURS.items():
        gain = [(law["law"], _of(law, balancer)["throughput_gain"]) for law in laws]
        out[f"throughput_gain_chart{suffix}"] = min((each for name, each in gain if name in CHARTS), default=None)
        out[f"throughput_gain_worst{suffix}"] = min(each for _, each in gain)
        for key in ("regret", "regret_unseen"):
            worst = max(law[f"auto_{key}{suffix}"] for law in laws)
            out[f"auto_worst_{key}{suffix}"] = worst
    return out


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def table(result: dict[str, Any]) -> str:
    """One line per law and size, and the keys."""
    names = list(BALANCERS)
    lines = ["throughput over none", "law".ljust(16) + "size" + "".join(name[:12].rjust(14) for name in names)]
    for law in result["laws"]:
        gains = "".join(f"{_of(law, name)['throughput_gain']:14.3f}" for name in names)
        lines.append(f"{law['law']:16}{law['samples_per_microbatch']:4}{gains}")
    lines += ["", "auto: largest microbatch over bound, standard deviation of none over its own, what it chose"]
    for law in result["laws"]:
        for suffix, name in OURS.items():
            own, choices = _of(law, name), law[f"auto_choices{suffix}"]
            parts = [f"{m} {own['over_bound'][m]:.3f} ({own['std_reduction'][m]:.1f}x)" for m in own["over_bound"]]
            chosen = ", ".join(f"{policy} ({count})" for policy, count in choices.items())
            lines.append(f"{law['law']:16}{law['samples_per_microbatch']:4}  {name:10}  {'; '.join(parts)}; {chosen}")
    lines.append("")
    for column, title in (("published", ""), ("published_held_out", ", fitted to disttrain alone")):
        for name, modules in result[column].items():
            for module, row in modules.items():
                numbers = ", ".join(f"{key} {value:.2f}" for key, value in row.items())
                lines.append(f"{name}{title}, {module}, ms: {numbers}")
    keys = {key: value for key, value in result.items() if key != "laws" and not key.startswith("published")}
    return "\n".join([*lines, "", *(f"{key}: {value}" for key, value in keys.items())])
