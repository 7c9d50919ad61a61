"""`hetmesh tune` from constants that are wrong by a factor of three: its choice, its time and its predictions.

Five small problems (`problems.py`) on two cores. All layouts of each that the planner has are measured once, in a turn
of tune's own: build, one step, `STEPS` timed ones. Then tune searches twice, from a machine file whose constants are
three times too large or too small in turns, and from one where they are so the other way round. It is given the turns
that were measured, or the first steps of them, and further turns run when it asks for them; it is charged with the
seconds of each, and with those of its own simulations and fits.

Steps are compared at equal pace of the machine, as tune does (`Finding.pace`): `pace` has the range of it over the
turns of a table, as shares of the median.

`within_3_percent` counts problems where both choices are within 3% of the best: each choice and the fastest layouts of
the table run again in three rounds, and the medians of three are compared; or within the scatter of these three, where
that is more. `share_of_time`: what the slower of both searches took of the time of measuring all, mean of problems.
`error_before`, `error_after`: mean relative error of the predicted steps of layouts that never ran in a search, by the
machine file that it was given, and in the end; `error_of_machine`: by the fitted machine file alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tune.problems import PROBLEMS, Case
from benchmarks.tune.runs import Runs, pools
from hetmesh.cost import load_machine, machine_toml
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.tune.constants import fitted_names, with_factors
from hetmesh.training.tune.findings import Findings, to_pace
from hetmesh.training.tune.guesses import Layouts
from hetmesh.training.tune.tuner import Tuner
from hetmesh.training.tune.turns import STEPS

JUDGES = ("src/hetmesh/training/tune", "src/hetmesh/cost", "src/hetmesh/planner", "src/hetmesh/simulate")
"""What an output of it judges (`kept.py`)."""

WRONG = 3.0
_FASTEST, _ROUNDS = 4, 3  # layouts of the table that run again with the choices, and how often
_CLOSE = 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    names = list(PROBLEMS)
    parser.add_argument("--only", type=int, nargs="*", default=list(range(len(names))), help="numbers of problems")
    parser.add_argument("--turns", type=Path, metavar="FOLDER", help="keep what was measured there, and use it again")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all layouts, search, and judge the choices."""
    rows = []
    if args.turns:
        args.turns.mkdir(parents=True, exist_ok=True)
    with pools() as by_ranks:
        for number in args.only:
            name, case = list(PROBLEMS.items())[number]
            path = args.turns / f"{number}.json" if args.turns else None
            rows.append({"problem": name} | judged(case, number, by_ranks[case.ranks], path))
    means = ("share_of_time", "error_before", "error_after", "error_of_machine")
    return {
        "within_3_percent": sum(row["within"] for row in rows),
        **{key: statistics.mean(row[key] for row in rows) for key in means},
        "problems": len(rows),
        "layouts": [row["layouts"] for row in rows],
        "rows": rows,
    }


def judged(case: Case, number: int, pool: WorkerPool, path: Path | None = None) -> dict[str, Any]:
    """The row of one problem."""
    asked = case.asked()
    problem = asked.problem()
    runs = Runs(pool, asked, problem, Layouts(problem), path)
    for layout in runs.layouts.plans:
        runs.turn(layout, 0, STEPS)
    table = Findings(each=[turns[0] for turns in runs.known.values()])
    medians, whole = table.seconds, table.spent_s
    paces = [own.pace / table.usual_pace for own in table.each if own.pace]
    names = fitted_names(problem.machine, case.ranks)
    searches = []
    for direction in (1, -1):
        signs = {name: direction * (-1) ** (i + number) for i, name in enumerate(names)}
        wrong = with_factors(problem.machine, {name: sign * math.log(WRONG) for name, sign in signs.items()})
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "machine.toml")
            file.write_text(machine_toml(wrong, "wrong by a factor of three"), "utf-8")
            searches.append(searched(case, str(file), runs) | {"wrong": signs})
    chosen = [row["choice"] for row in searches]
    again = [*dict.fromkeys([*chosen, *sorted(medians, key=lambda own: medians[own])[:_FASTEST]])]
    rounds = [Findings(each=[runs.measured(layout, STEPS) for layout in again]).seconds for _ in range(_ROUNDS)]
    three = {layout: sorted(each[layout] for each in rounds) for layout in again}
    best = min(three, key=lambda layout: three[layout][1])
    for row in searches:
        low, middle, high = three[row["choice"]]
        row["over_best"] = middle / three[best][1] - 1
        row["scatter"] = max((high - low) / 2 / middle, (three[best][2] - three[best][0]) / 2 / three[best][1])
        row["within"] = row["over_best"] <= max(_CLOSE, row["scatter"])
        row["share_of_time"] = row["seconds"] / whole
        for key in ("before", "after", "of_machine"):
            scale = to_pace(row["pace"], table.usual_pace) if key != "before" else 1.0
            predicted = {name: scale * seconds for name, seconds in row.pop(key).items()}
            never = [own for own in medians if own in predicted and own not in row["ran"]]
            row[f"error_{key}"] = statistics.mean(abs(predicted[own] / medians[own] - 1) for own in never)
    return {
        "layouts": len(table.each),
        "ran": len(medians),
        "within": all(row["within"] for row in searches),
        "share_of_time": max(row["share_of_time"] for row in searches),
        **{f"error_{key}": statistics.mean(row[f"error_{key}"] for row in searches) for key in ("before", "after")},
        "error_of_machine": statistics.mean(row["error_of_machine"] for row in searches),
        "seconds_of_all": whole,
        "pace": [min(paces), max(paces)],
        "slowest_over_best": max(medians.values()) / min(medians.values()),
        "best": best,
        "searches": searches,
    }


def searched(case: Case, machine: str, runs: Runs) -> dict[str, Any]:
    """What tune does from a machine file: its choice, what it took, and what it predicts."""
    started, measuring = time.perf_counter(), 0.0
    asked = case.asked(machine)
    problem = asked.problem()
    tuner = Tuner(Layouts(problem), load_machine(machine), Findings())
    turns = []
    while (turn := tuner.next()) is not None:
        runs.layouts.plans |= tuner.layouts.plans  # on another machine the planner may fill other gaps
        turns.append([turn.layout, turn.steps])
        began = time.perf_counter()
        finding = runs.turn(turn.layout, tuner.findings.turns.get(turn.layout, 0), turn.steps)
        measuring += time.perf_counter() - began
        tuner.add(finding)
    own = time.perf_counter() - started - measuring
    fitted = tuner.layouts.guesses(tuner.machine)
    return {
        "choice": tuner.best,
        "seconds": own + tuner.findings.spent_s,
        "seconds_of_search": own,
        "turns": turns,
        "ran": sorted(tuner.findings.seconds),
        "factors": tuner.findings.factors,
        "scatter_of_steps": tuner.findings.scatter,
        "pace": tuner.findings.usual_pace,
        "before": tuner.before,
        "after": dict(tuner.ranking.seconds),
        "of_machine": {name: guess.seconds for name, guess in fitted.items()},
    }


def table(result: dict[str, Any]) -> str:
    """Three lines per problem."""
    lines = []
    for row in result["rows"]:
        lines.append(
            f"{row['problem']}: {row['layouts']} layouts in {row['seconds_of_all']:.0f} s, the slowest "
            f"{row['slowest_over_best']:.2f} of the best; pace {row['pace'][0]:.2f} to {row['pace'][1]:.2f}"
        )
        lines += [
            f"    chosen {own['over_best']:+.1%} (scatter {own['scatter']:.1%}) in {own['share_of_time']:.0%} of the "
            f"time, {len(own['turns'])} turns; errors {own['error_before']:.1%} before, "
            f"{own['error_after']:.1%} after, {own['error_of_machine']:.1%} by the machine file"
            for own in row["searches"]
        ]
    keys = ("within_3_percent", "share_of_time", "error_before", "error_after", "error_of_machine")
    return "\n".join([*lines, ", ".join(f"{key} {result[key]:.3g}" for key in keys)])
