"""The README's table of what was measured, from the outputs kept in tools/results.

    python tools/measured_table.py            # print it
    python tools/measured_table.py --write    # put it into README.md, after another output was kept

A row whose output is not kept is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import page_table

ROOT = Path(__file__).parents[1]
RESULTS, README = ROOT / "tools" / "results", ROOT / "README.md"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was measured, and where.
        output: name of the kept output, `NAME.json`.
        figures: the second cell, with `{}` for each of `keys`.
        keys: where the figures are in it: keys and indices joined by dots; of a list there, how many it has.
        command: what measures it again.
    """

    what: str
    output: str
    figures: str
    keys: tuple[str, ...]
    command: str

    def cells(self) -> tuple[str, ...]:
        """The cells of the line."""
        kept = json.loads((RESULTS / f"{self.output}.json").read_text(encoding="utf-8"))
        values = [reduce(_inside, key.split("."), kept) for key in self.keys]
        values = [len(value) if isinstance(value, list) else value for value in values]
        return self.what, self.figures.format(*values), f"`{self.command}`"


def _inside(value: Any, key: str) -> Any:
    return value[int(key)] if isinstance(value, list) else value[key]


ROWS = (
    Row(
        "step of a 1B model in bf16, and of the digits, over that of a plain PyTorch loop, one H100",
        "gpu_check",
        "{:.2f}; {:.2f}",
        ("cases.2.step_time_ratio", "cases.0.step_time_ratio"),
        "python tools/gpu_check.py --only step_time",
    ),
    Row(
        "the same for small models on CPUs, the worst of four cases",
        "overhead",
        "{:.2f}",
        ("max_step_time_ratio",),
        "python tools/bench.py overhead",
    ),
    Row(
        "digits in fp32, three layouts against one process: largest difference of a loss in the first 100 steps",
        "convergence",
        "{:.0e}",
        ("max_loss_difference",),
        "python tools/bench.py convergence",
    ),
    Row(
        "boundaries: bytes over the fewest possible; time over bare messages of the same bytes, 8 ranks, gloo",
        "boundary",
        "{:.2f}; {:.2f}",
        ("max_bytes_over_bound", "max_time_ratio_vs_bare"),
        "python tools/bench.py boundary",
    ),
    Row(
        "step without balancing over a balanced one: charts, encoder and LLM on a core each",
        "straggler",
        "{:.2f}",
        ("measured_ratio",),
        "python tools/bench.py straggler",
    ),
    Row(
        "stages cut without regard to what is frozen over those cut with it: frozen encoder, two cores",
        "frozen",
        "{:.2f}",
        ("speedup_measured",),
        "python tools/bench.py frozen",
    ),
    Row(
        "three_phase over bubble_fill: two cores, two microbatches",
        "bubble",
        "{:.2f}",
        ("speedup_measured",),
        "python tools/bench.py bubble",
    ),
    Row(
        "simulated: bubble_fill, ViT-22B in GPT-175B on 1,536 to 3,072 GPUs: least share of what perfect hiding gains",
        "optimus",
        "{:.0%}",
        ("share_of_bound",),
        "python tools/bench.py optimus",
    ),
    Row(
        "predicted step time of ten plans on two cores: mean and largest error; rank correlation",
        "plans",
        "{:.1%}; {:.1%}; {:.2f}",
        ("mean_error", "worst_error", "rank_correlation"),
        "python tools/bench.py plans",
    ),
    Row(
        "predicted step time of 21 published pairs of H100 runs: mean error; rank correlation; knows the faster one in",
        "planner",
        "{:.0%}; {:.2f}; {:.0%} (who always says heterogeneous: {:.0%})",
        ("mean_step_error", "rank_correlation", "gain_sign_accuracy", "trivial.gain_sign_accuracy"),
        "python tools/bench.py planner",
    ),
    Row(
        "predicted peak memory of a rank of an 8B model, against its dry run",
        "dryrun",
        "{:.0%} off",
        ("memory_error",),
        "python tools/bench.py dryrun",
    ),
    Row(
        "context parallelism, 65,536 tokens on 8 ranks: busiest rank over the mean, attention tiles; tokens",
        "context",
        "{:.3f}; {:.3f}",
        ("worst_tile_imbalance", "worst_token_imbalance"),
        "python tools/bench.py context",
    ),
    Row(
        "experts on two ranks: step over that with all experts on both; skewed routing, busiest rank before, after",
        "experts",
        "{:.2f}; {:.2f}, {:.2f}",
        ("step_time_ratio", "skew_load_before", "skew_load_after"),
        "python tools/bench.py experts",
    ),
    Row(
        "samples per second over those of a plain DataLoader, two workers",
        "loader",
        "{:.2f}",
        ("ratio_vs_dataloader",),
        "python tools/bench.py loader",
    ),
    Row(
        "steps with an asynchronous save in 20 over those without, less 1; bandwidth of saves, loads over torch's own",
        "checkpoint",
        "{:+.1%}; {:.2f}, {:.2f}",
        ("async_overhead", "save_ratio", "load_ratio"),
        "python tools/bench.py checkpoint",
    ),
    Row(
        "kills at drawn moments of runs that are started again; runs that hung or ended with other losses",
        "soak_kills",
        "{}; {}",
        ("n", "failures"),
        "python tools/soak.py kills",
    ),
    Row(
        "spoiled files for every reader; errors that are not the project's own, hangs, paths out of folders, bombs",
        "fuzz_readers",
        "{}; {}",
        ("n", "failures"),
        "python tools/fuzz.py readers",
    ),
)


def table() -> str:
    """The table in Markdown."""
    kept = [row.cells() for row in ROWS if (RESULTS / f"{row.output}.json").is_file()]
    return page_table.markdown(["what", "measured", "again by"], kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    if parser.parse_args(argv).write:
        page_table.write(README, "measured_table", table())
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
