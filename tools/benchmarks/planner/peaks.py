"""Predicted peaks of memory beside published ones, with predictors that know less, and reasons for what is off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.planner.agreement import mean_error
from benchmarks.planner.megatron_bytes import BF16, FP32, megatron_bytes
from benchmarks.planner.published_rows import Row
from benchmarks.planner.row_predictions import RECOMPUTED, VARIANTS, fullest, row_plan, row_problem
from hetmesh.cost import load_machine
from hetmesh.planner import Predictor

TOLERATED = 0.25
"""A peak that is further off has its reasons named."""


def peak_agreement(rows: Sequence[Row], peaks: Sequence[Sequence[float]], limit: int) -> dict[str, Any]:
    """The share of layouts within `limit` bytes, and the mean error against published peaks; None without any.

    Args:
        peaks: predicted, of both layouts of each row.
    """
    pairs = [both for row, own in zip(rows, peaks, strict=True) for both in zip(own, row.peaks, strict=True)]
    known = [(predicted, published) for predicted, published in pairs if published is not None]
    return {
        "fits_80gb_share": sum(predicted <= limit for predicted, _ in pairs) / len(pairs),
        "peak_memory_error": mean_error(*map(list, zip(*known, strict=True))) if known else None,
    }


def other_predictions(rows: Sequence[Row], machine: str) -> dict[str, dict[str, Any]]:
    """The same figures of what is not published the other way round, of Megatron's bytes by published formulas, of the
    weights alone, and of the mean of the published peaks, which is fitted to them."""
    limit = load_machine(machine).memory_bytes
    published = [peak for row in rows for peak in row.peaks if peak is not None]
    mean = sum(published) / max(len(published), 1)

    def formulas(gradient: int) -> Callable[[Row, int], float]:
        return lambda row, i: sum(megatron_bytes(row, i, row.encoder > RECOMPUTED, gradient).values())

    predictors: dict[str, Callable[[Row, int], float]] = {
        "Megatron's bytes by published formulas": formulas(BF16),
        "these with gradients in fp32": formulas(FP32),
        "bf16 weights alone": lambda row, i: megatron_bytes(row, i, False)["parameters"],
        "the mean of the published peaks": lambda row, i: mean,
    }
    for name, options in VARIANTS.items():
        predictors[name] = lambda row, i, own=options: _peak(row, i, machine, own)
    return {
        name: peak_agreement(rows, [[predict(row, i) for i in range(2)] for row in rows], limit)
        for name, predict in predictors.items()
    }


def _peak(row: Row, which: int, machine: str, options: Any) -> int:
    problem = row_problem(row, machine, row.gpus[which], options)
    return fullest(Predictor(problem, lanes=4), row_plan(row, which)).total


def memory_remarks(row: Row, which: int, predicted: float) -> list[str]:
    """Why a predicted peak is further off than `TOLERATED`, as far as formulas say; empty for one that is not."""
    published = row.peaks[which]
    if published is None or abs(predicted / published - 1) <= TOLERATED:
        return []
    parts = megatron_bytes(row, which, row.encoder > RECOMPUTED)
    formulas, encoder = sum(parts.values()), parts["encoder activations"]
    said = f"{predicted / 1e9:.0f} GB against {published / 1e9:.0f}; by published formulas {formulas / 1e9:.0f}"
    if predicted < published:
        return [f"{said}: both lack the same, so shapes, samples of a microbatch or buffers are others than assumed"]
    if row.encoder <= RECOMPUTED and encoder > published - (formulas - encoder):
        said += f", of which the encoder's activations of all samples of the step are {encoder / 1e9:.0f}: they do not "
        return [f"{said}fit beside the rest of the published peak, so fewer samples were ahead, or it was recomputed"]
    return [said]
