"""Work: what a global batch gives each module to do, from sample metadata alone. No communication, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hetmesh.graph import MetaArrays, ModuleGraph, SampleMeta
from hetmesh.graph.sample import kinds_of


@dataclass(frozen=True)
class Work:
    """What one module has to do; padding is no work.

    Attributes:
        rows: rows or tokens that go through its blocks.
        pairs: (query, key) pairs, the sum of the squared lengths of its sequences. All of them, also those that a
            causal mask hides: the convention of torchtitan's MFU and of torch's FlopCounterMode.
        targets: positions for which it predicts a token.
    """

    rows: int = 0
    pairs: int = 0
    targets: int = 0

    @classmethod
    def sum_of(cls, work: np.ndarray) -> Work:
        """From rows, pairs and targets along the last axis, summed over all others."""
        return cls(*work.reshape(-1, 3).sum(0).tolist())

    def __add__(self, other: Work) -> Work:
        return Work(self.rows + other.rows, self.pairs + other.pairs, self.targets + other.targets)


def sample_work(graph: ModuleGraph, name: str, sample: SampleMeta) -> Work:
    """What `sample`, whose metadata is expanded, gives module `name` to do.

    An encoder or generator attends within each media item, the LLM within the whole sample, other modules not at all.
    """
    if name == graph.llm.name:
        return Work(sample.tokens, sample.tokens**2, sample.num_targets)
    rows = sample.rows.get(name, 0)
    if graph[name].media is None:
        return Work(rows)
    items = [item.rows for item in sample.media if item.name in kinds_of(graph[name].media or "")]
    reaching = sum(items)  # the LLM; what is between scales every item alike
    return Work(rows, round((rows / reaching) ** 2 * sum(item**2 for item in items)) if reaching else 0)


def samples_work(graph: ModuleGraph, name: str, samples: MetaArrays) -> np.ndarray:
    """`sample_work` of all samples at once: int64 `[samples, 3]`, rows, pairs and targets."""
    if name == graph.llm.name:
        return np.column_stack([samples.tokens, samples.tokens**2, samples.num_targets])
    rows = samples.rows_of(name)
    pairs = np.zeros_like(rows)
    if (kind := graph[name].media) in samples.kinds:
        items = np.where(samples.items[:, 0] == samples.kinds.index(kind), samples.items[:, 2], 0)
        reaching, squares = samples.sum_of_items(items), samples.sum_of_items(items**2)
        some = reaching > 0
        pairs[some] = np.rint((rows[some] / reaching[some]) ** 2 * squares[some])
    return np.column_stack([rows, pairs, np.zeros_like(rows)])


def computed_work(graph: ModuleGraph, name: str, samples: Sequence[SampleMeta]) -> Work:
    """What one lane computes for `samples` in one microbatch: as the sum of `sample_work`, but the LLM computes the
    padding of its samples to the longest one too, and one token where it has none."""
    work = total_work(sample_work(graph, name, sample) for sample in samples)
    if name != graph.llm.name:
        return work
    longest = max((sample.tokens for sample in samples), default=1)
    count = max(len(samples), 1)
    return Work(count * longest, count * longest**2, work.targets)


def total_work(parts: Iterable[Work]) -> Work:
    """The sum of `parts`."""
    rows = pairs = targets = 0  # not as Work + Work: this runs over all samples of every step
    for part in parts:
        rows, pairs, targets = rows + part.rows, pairs + part.pairs, targets + part.targets
    return Work(rows, pairs, targets)


def imbalance(work: np.ndarray) -> float:
    """How much longer the lanes of a module take together than they would if rows were spread evenly: the busiest lane
    of each microbatch, summed, over the mean lane. 1.0 is even; 1.0 too where there is nothing to do.

    Args:
        work: `BatchPlan.lane_work`. Lanes wait for each other in every microbatch, so that a lane that is busy now does
            not make up for another one that was busy before.
    """
    rows = work[..., 0]
    mean = float(rows.mean(1).sum())
    return float(rows.max(1).sum()) / mean if mean else 1.0
