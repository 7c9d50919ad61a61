"""The tables of measurements, from the outputs kept in tools/results: all on the page there, a few in README.md.

    python tools/measured_table.py            # print them
    python tools/measured_table.py --write    # put them into their pages, after another output was kept

A row whose output is not kept is left out. One that is older than the code that it judges (`kept.py`) carries its date.
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
from kept import changed, kept

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tools" / "results"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was measured, and where.
        output: name of the kept output, `NAME.json`.
        figures: the second cell, with `{}` for each of `keys`.
        keys: where the figures are in it: keys and indices joined by dots; of a list there, how many it has.
        command: what measures it again.
        precedes: what has been written since, of what this machine cannot measure again.
    """

    what: str
    output: str
    figures: str
    keys: tuple[str, ...]
    command: str
    precedes: str = ""

    def cells(self, dated: bool) -> tuple[str, ...]:
        """The cells of the line.

        Args:
            dated: with the date of the output, and what it precedes.
        """
        output = json.loads(self.path.read_text(encoding="utf-8"))
        values = [reduce(_inside, key.split("."), output) for key in self.keys]
        values = [len(value) if isinstance(value, list) else value for value in values]
        what, figures = self.what, self.figures.format(*values)
        if dated:
            what += f" (before {self.precedes})" if self.precedes else ""
            figures += f" ({kept(self.path)['date']})"
        return what, figures, f"`{self.command}`"

    @property
    def path(self) -> Path:
        """Of the kept output."""
        return RESULTS / f"{self.output}.json"

    @property
    def stale(self) -> bool:
        """Whether code that the output judges has changed since."""
        return bool(changed(kept(self.path)))


def _inside(value: Any, key: str) -> Any:
    return value[int(key)] if isinstance(value, list) else value[key]


HEAD = ("what", "measured", "again by")

ADVANTAGE = tuple(
    Row(
        f"two CPU cores, {what}: step time before over after (predicted by `hetmesh simulate` before the run)",
        "advantage",
        "{:.2f} ({:.2f})",
        (f"speedup.{case}", f"predicted.{case}"),
        "python tools/bench.py advantage",
    )
    for case, what in (
        ("a", "LLM tensor parallel 2: encoder in the same layout, then data parallel"),
        ("b", "LLM in two pipeline stages, four microbatches: encoder in front of the first, best cut, then on both"),
        (
            "c",
            "LLM context parallel 2: encoder computed on every rank (what others do, not the best homogeneous layout), "
            "then dealt out",
        ),
        ("d", "chart lengths, data parallel 2: no balancing, then the default"),
        ("e", "clips of 4 to 512 frames, half of them below 7, data parallel 2: no balancing, then the default"),
    )
)

CARDS = Row(
    "predicted step time of 44 published runs of other frameworks on 1 to 1,024 H100 in bf16 (repeats count once; "
    "two terms for the host came after these rows had been seen; lengths of packed samples are assumed; without "
    "overlaps, slower kernels of small experts and skewed routing): mean and worst error; rank correlation; "
    "the same without the five under context parallelism (6 FLOPs per active parameter and token at 40% of the peak)",
    "cards",
    "{:.0%}, {:.0%} ({:.0%}, {:.0%}); {:.2f} ({:.2f}); {:.2f} ({:.2f})",
    (
        *("mean_step_error", "worst_step_error", "trivial.mean_step_error", "trivial.worst_step_error"),
        *("rank_correlation", "trivial.rank_correlation"),
        *(f"without_context_parallel.{key}" for key in ("rank_correlation", "trivial.rank_correlation")),
    ),
    "python tools/bench.py cards",
)

ROWS = (
    *ADVANTAGE,
    Row(
        "step time over a plain PyTorch loop's, one H100: a 1B model in bf16; digits in fp32, in bf16",
        "gpu_check",
        "{:.2f}; {:.2f}, {:.2f}",
        ("cases.2.step_time_ratio", "cases.0.step_time_ratio", "cases.1.step_time_ratio"),
        "python tools/gpu_check.py --only step_time",
        "streams, pinned copies, building on meta, vocabulary-parallel loss, experts and asynchronous checkpoints",
    ),
    Row(
        "four processes over NCCL on one H200, torch 2.11: nine layouts in fp64 against one process on the CPU",
        "gpu_check_parity",
        "{:.0e}",
        ("checks.0.figures.max_error",),
        "python tools/gpu_check.py --only parity",
    ),
    Row(
        "peak memory of a 1B model there, two layouts: error of the prediction; of the dry run",
        "gpu_check_memory",
        "{:.1%}; {:.1%}",
        ("checks.0.figures.prediction_error", "checks.0.figures.dry_run_error"),
        "python tools/gpu_check.py --only memory",
    ),
    Row(
        "step time over a plain PyTorch loop's for small models on CPUs, worst of four cases",
        "overhead",
        "{:.2f}",
        ("max_step_time_ratio",),
        "python tools/bench.py overhead",
    ),
    Row(
        "digits in fp32, three layouts against one process: largest difference of a loss in the first 100 steps; of "
        "the accuracy on 384 questions after 800 steps",
        "convergence",
        "{:.0e}; {:.3f}",
        ("max_loss_difference", "max_accuracy_difference"),
        "python tools/bench.py convergence",
    ),
    Row(
        "digits read and drawn, three seeds: fewest right answers to held-out questions; fewest right drawings, as the "
        "nearest held-out real digit says; two layouts in fp32: largest difference of a loss in the first 100 steps",
        "drawing",
        "{:.2f}; {:.2f}; {:.0e}",
        ("min_answer_accuracy", "min_drawn_accuracy", "max_loss_difference"),
        "python tools/bench.py drawing",
    ),
    Row(
        "boundaries, 8 ranks on one host: bytes over the least possible; time through shared memory over bare "
        "messages of the same bytes through gloo's sockets, worst of 16 MiB, of small ones",
        "boundary",
        "{:.2f}; {:.2f}, {:.2f}",
        ("max_bytes_over_bound", "max_time_ratio_vs_bare", "small_time_ratio_vs_bare"),
        "python tools/bench.py boundary",
    ),
    Row(
        "step without balancing over a balanced one: charts, encoder and LLM on one core each, by default; with "
        '`balance.microbatches = "free"`',
        "straggler",
        "{:.2f}; {:.2f}",
        ("measured_ratio_fixed", "measured_ratio"),
        "python tools/bench.py straggler",
    ),
    Row(
        "step with stages cut as if nothing were frozen over one with cuts for what is frozen: encoder, two cores; "
        "predicted",
        "frozen",
        "{:.2f}; {:.2f}",
        ("speedup_measured", "speedup_expected"),
        "python tools/bench.py frozen",
    ),
    Row(
        "three_phase over bubble_fill: two cores, two microbatches; predicted",
        "bubble",
        "{:.2f}; {:.2f}",
        ("speedup_measured", "speedup_predicted"),
        "python tools/bench.py bubble",
    ),
    Row(
        "the same with four microbatches",
        "bubble_4",
        "{:.2f}; {:.2f}",
        ("speedup_measured", "speedup_predicted"),
        "python tools/bench.py bubble --microbatches 4",
    ),
    Row(
        "simulated: `bubble_fill` of ViT-22B and GPT-175B on 1,536, 2,048 and 3,072 GPUs, as a share of the time that "
        "hiding the encoder perfectly would save: with encoder kernels in gaps of tensor parallelism, by plans that "
        "`check` takes and of which `dryrun` reaches the end of a step; without them in these gaps",
        "optimus",
        "{:.2f}, {:.2f}, {:.2f}; {:.2f}, {:.2f}, {:.2f}",
        (
            *(f"share_of_saving.{gpus}" for gpus in (1536, 2048, 3072)),
            *(f"share_of_saving_without_tp_gaps.{gpus}" for gpus in (1536, 2048, 3072)),
        ),
        "python tools/bench.py optimus",
    ),
    Row(
        "step time of ten plans on two cores, predicted from costs measured in the same run (not by `hetmesh plan`): "
        "mean and largest error; rank correlation",
        "plans",
        "{:.1%}; {:.1%}; {:.2f}",
        ("mean_error", "worst_error", "rank_correlation"),
        "python tools/bench.py plans",
    ),
    Row(
        "`hetmesh tune` on two cores, five problems of 35 to 67 layouts, from constants wrong by a factor of three: "
        "choices within 3% of the best; time, as a share of measuring all; error of predicted steps of layouts that "
        "never ran, before and after",
        "tune",
        "{} of {}; {:.0%}; {:.0%}, {:.1%}",
        ("within_3_percent", "problems", "share_of_time", "error_before", "error_after"),
        "python tools/bench.py tune",
    ),
    Row(
        "predicted step time of 21 published pairs of H100 runs: mean error; rank correlation (FLOPs alone, fitted to "
        "these rows)",
        "planner",
        "{:.0%} ({:.1%}); {:.2f} ({:.2f})",
        ("mean_step_error", "trivial.mean_step_error", "rank_correlation", "trivial.step_rank_correlation"),
        "python tools/bench.py planner",
    ),
    Row(
        "predicted gain of the heterogeneous run of each pair: percentage points off; which is faster (a fitted "
        "constant gain); correlation of gains",
        "planner",
        "{:.1f} ({:.1f}); {:.0%} ({:.0%}); {:.2f}",
        (
            *("gain_error_points", "trivial.gain_error_points"),
            *("gain_sign_accuracy", "trivial.gain_sign_accuracy", "gain_correlation"),
        ),
        "python tools/bench.py planner",
    ),
    Row(
        "predicted peak memory per rank of those runs, gradients in bf16: mean error (the mean of the published peaks; "
        "with gradients in fp32); layouts that fit 80 GB, as all of them did (with gradients in fp32)",
        "planner",
        "{:.0%} ({:.0%}; {:.0%}); {:.0%} ({:.0%})",
        (
            *("peak_memory_error", "memory.the mean of the published peaks.peak_memory_error"),
            *("memory.gradients in fp32.peak_memory_error", "fits_80gb_share"),
            "memory.gradients in fp32.fits_80gb_share",
        ),
        "python tools/bench.py planner",
    ),
    Row(
        "simulated: ViT-22B and GPT-175B on 3,072 GPUs with optimizer state sharded over 48 replicas (ZeRO-1), as a "
        "share of the step without",
        "planner",
        "{:.3f}",
        ("zero1_step_over_replicas",),
        "python tools/bench.py planner",
    ),
    CARDS,
    Row(
        "of these runs, adapters alone (LoRA) and the others: mean error (6 FLOPs); peak memory of the one that has it",
        "cards",
        "{:.0%} ({:.0%}), {:.0%} ({:.0%}); {:.0%}",
        (
            *("lora.mean_step_error", "lora.trivial.mean_step_error", "full.mean_step_error"),
            *("full.trivial.mean_step_error", "memory_error"),
        ),
        "python tools/bench.py cards",
    ),
    Row(
        "predicted peak memory per rank of an 8B model in two layouts, against its dry run (no GPU)",
        "dryrun",
        "{:.1%}, {:.1%} off",
        (
            "cases.tensor parallel 4 x FSDP 2.memory_error",
            "cases.context parallel 4, pipeline 2, 32k.memory_error",
        ),
        "python tools/bench.py dryrun",
    ),
    Row(
        "context parallelism, 65,536 tokens on 8 ranks, worst of eight masks: busiest rank over the mean, attention "
        "tiles (zigzag, contiguous); tokens",
        "context",
        "{:.3f} ({:.2f}, {:.2f}); {:.3f}",
        (
            *("worst_tile_imbalance", "worst_tile_imbalance_zigzag", "worst_tile_imbalance_contiguous"),
            "worst_token_imbalance",
        ),
        "python tools/bench.py context",
    ),
    Row(
        "experts spread over two ranks: step over one with all experts on both",
        "experts",
        "{:.2f}",
        ("step_time_ratio",),
        "python tools/bench.py experts",
    ),
    Row(
        "head and loss of an LLM by chunks of targets, 248,320 tokens, TP 2, 16,384 targets in bf16: GiB held at most "
        "(with whole logits), by a dry run; time over that of whole logits on the CPU, worst of two layouts",
        "head",
        "{:.2f} ({:.2f}); {:.2f}",
        ("peak_gib", "peak_gib_whole", "step_ratio"),
        "python tools/bench.py head",
    ),
    Row(
        "skewed routing, busiest rank over the mean before and after experts are placed, worst of the sizes where "
        "1.15 is in reach; of all (128 experts on 8 ranks; the least possible)",
        "experts",
        "{:.2f}, {:.2f}; {:.2f} ({:.2f})",
        ("skew_load_before", "skew_load_after", "skew_load_after_all", "skew_least_all"),
        "python tools/bench.py experts",
    ),
    Row(
        "samples per second over a plain DataLoader's, two workers",
        "loader",
        "{:.2f}",
        ("ratio_vs_dataloader",),
        "python tools/bench.py loader",
    ),
    Row(
        "steps with an asynchronous save in 20 over those without, less 1; bandwidth of saves, loads over torch's own, "
        "loads from the page cache",
        "checkpoint",
        "{:+.1%}; {:.2f}, {:.2f}, {:.2f}",
        ("async_overhead", "save_ratio", "load_ratio", "load_ratio_from_cache"),
        "python tools/bench.py checkpoint",
    ),
    Row(
        "two CPU cores, a job goes from FSDP to tensor parallelism, two stages, one rank and back, without a file: "
        "bytes over the least possible; most memory over the larger share; time over that of save, start and load, "
        "median, worst",
        "relayout",
        "{:.2f}; {:.2f}; {:.2f}, {:.2f}",
        ("bytes_over_bound", "peak", "time_share", "worst_time_share"),
        "python tools/bench.py relayout",
    ),
    Row(
        "drawn pairs of layouts between which a job changes without a file: of these with other losses, more bytes or "
        "more memory than allowed; largest relative error of the next three losses, float64",
        "fuzz_relayouts",
        "{}: {}; {:.0e}",
        ("pairs", "failures", "max_error"),
        "python tools/fuzz.py relayouts",
    ),
    Row(
        "runs killed at random moments and restarted; of these hung; ended with different losses",
        "soak_kills",
        "{}; {}; {}",
        ("n", "hangs", "failures"),
        "python tools/soak.py kills --n 200",
    ),
    Row(
        "runs under torchrun's agents that lose ranks at random moments and get them back: 8, 6, 4, 8; of these hung; "
        "lost a saved step or went on with other losses than that layout alone",
        "soak_elastic",
        "{}; {}; {}",
        ("n", "hangs", "failures"),
        "python tools/soak.py elastic --n 20",
    ),
    Row(
        "corrupted files for every reader; foreign exceptions, hangs, paths out of their folder, decompression bombs",
        "fuzz_readers",
        "{}; {}",
        ("n", "failures"),
        "python tools/fuzz.py readers --n 10000",
    ),
)


FRONT = (
    *ADVANTAGE,
    Row(
        "digits in fp32, three layouts against one process: largest difference of a loss in the first 100 steps",
        "convergence",
        "{:.0e}",
        ("max_loss_difference",),
        "python tools/bench.py convergence",
    ),
    Row(
        "small models on two CPU cores: step time over a plain PyTorch loop's, worst of four cases",
        "overhead",
        "{:.2f}",
        ("max_step_time_ratio",),
        "python tools/bench.py overhead",
    ),
    Row(
        "boundaries, 8 CPU processes on one host: bytes over the least possible; time through shared memory over bare "
        "gloo messages of the same bytes, worst case of 16 MiB",
        "boundary",
        "{:.2f}; {:.2f}",
        ("max_bytes_over_bound", "max_time_ratio_vs_bare"),
        "python tools/bench.py boundary",
    ),
    Row(
        "charts, encoder and LLM on one core each: step without balancing over a balanced one, by default; with "
        '`balance.microbatches = "free"`',
        "straggler",
        "{:.2f}; {:.2f}",
        ("measured_ratio_fixed", "measured_ratio"),
        "python tools/bench.py straggler",
    ),
    Row(
        "simulated: `bubble_fill` of ViT-22B and GPT-175B on 1,536, 2,048 and 3,072 GPUs, as a share of the time that "
        "hiding the encoder perfectly would save: with encoder kernels in gaps of tensor parallelism, by plans that "
        "`check` takes and of which `dryrun` reaches the end of a step; without them in these gaps",
        "optimus",
        "{:.2f}, {:.2f}, {:.2f}; {:.2f}, {:.2f}, {:.2f}",
        (
            *(f"share_of_saving.{gpus}" for gpus in (1536, 2048, 3072)),
            *(f"share_of_saving_without_tp_gaps.{gpus}" for gpus in (1536, 2048, 3072)),
        ),
        "python tools/bench.py optimus",
    ),
    CARDS,
)

PAGES = {RESULTS / "README.md": ROWS, ROOT / "README.md": FRONT}


def table(rows: Sequence[Row]) -> str:
    """The table of `rows` in Markdown."""
    return page_table.markdown(HEAD, [row.cells(row.stale) for row in rows if row.path.is_file()])


def accepted(written: str, rows: Sequence[Row]) -> bool:
    """Whether `written` is the table of `rows`; they may have dates though nothing has changed since."""
    forms = [[page_table.line(row.cells(dated)) for dated in {row.stale, True}] for row in rows if row.path.is_file()]
    lines = written.splitlines()
    head = page_table.markdown(HEAD, []).splitlines()
    return lines[:2] == head and len(lines) == 2 + len(forms) and all(map(_among, lines[2:], forms))


def _among(line: str, forms: Sequence[str]) -> bool:
    return line in forms


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into their pages")
    write = parser.parse_args(argv).write
    for page, rows in PAGES.items():
        if write:
            page_table.write(page, "measured_table", table(rows))
        else:
            print(f"{page.relative_to(ROOT)}\n{table(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
