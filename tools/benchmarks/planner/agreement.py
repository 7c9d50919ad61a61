"""How well predictions agree with published steps and gains, beside predictors that know next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def mean_error(predicted: Sequence[float], published: Sequence[float]) -> float:
    """Mean of |predicted / published - 1|."""
    return float(np.mean(np.abs(np.array(predicted) / np.array(published) - 1)))


def best_factor(predicted: Sequence[float], published: Sequence[float]) -> float:
    """The factor for which `mean_error` of what it multiplies is least: the minimum lies where one of them is exact."""
    factors = [b / a for a, b in zip(predicted, published, strict=True)]
    return min(factors, key=lambda f: (mean_error([f * each for each in predicted], published), f))


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's; None where one of them is constant or there are fewer than two."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's: Pearson's of the ranks, equal ones sharing theirs."""
    return correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    each = np.array(values)
    return [float((each < v).sum() + ((each == v).sum() - 1) / 2) for v in each]


def sign_accuracy(predicted: Sequence[float], published: Sequence[float]) -> float:
    """Share of gains on the right side of zero."""
    return float(np.mean([(a > 0) == (b > 0) for a, b in zip(predicted, published, strict=True)]))


def trivial(
    flops: Sequence[float],
    steps: Sequence[tuple[float, float]],
    gpus: Sequence[tuple[int, int]],
    gains: Sequence[float],
) -> dict[str, Any]:
    """Two predictors that are fitted on the rows that they predict: FLOPs per GPU at one rate, the second layout faster
    by a constant gain; and that gain alone.

    Args:
        flops: of a step of each row.
        steps, gpus: seconds, and GPUs, of both layouts of each row.
        gains: percent, of throughput per GPU.
    """
    gain = min(gains, key=lambda g: (sum(abs(g - each) for each in gains), g))
    each = [(f / a, f / (b * (1 + gain / 100))) for f, (a, b) in zip(flops, gpus, strict=True)]
    flat, published = [s for pair in each for s in pair], [s for pair in steps for s in pair]
    factor = best_factor(flat, published)
    predicted = [factor * s for s in flat]
    return {
        "flops_per_gpu_s": 1 / factor,
        "gain_percent": gain,
        "mean_step_error": mean_error(predicted, published),
        "step_rank_correlation": rank_correlation(predicted, published),
        "gain_error_points": float(np.mean([abs(gain - g) for g in gains])),
        "gain_sign_accuracy": sign_accuracy([gain] * len(gains), gains),
    }
