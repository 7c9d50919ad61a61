"""What is odd about a step's batch or schedule: said the first time, counted from then on, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetmesh.data.cut_samples import describe_cut
from hetmesh.data.loader import DrawnBatch, describe_without_targets
from hetmesh.errors import SampleError
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.reporter import Reporter
from hetmesh.resolve.schedules import over_in_flight
from hetmesh.schedule import Schedule
from hetmesh.training.skip import describe_unreadable


def none_readable(step: int, left_out: Mapping[int, str]) -> SampleError:
    """That a step has nothing to learn from.

    Args:
        left_out: why each sample of its global batch cannot be read.
    """
    return SampleError(
        f"step {step}: no sample of the global batch can be read: {describe_unreadable(list(left_out.values()))}, or "
        f"take a larger batch: training.global_batch_size is {len(left_out)}"
    )


@dataclass(frozen=True)
class StepNotices:
    """Looks at the steps of one run, and tells its reporter."""

    recipe: Recipe
    reporter: Reporter

    def without_targets(self, step: int, drawn: DrawnBatch, left_out: Mapping[int, str]) -> int:
        """How many samples of the global batch have no target token; also tells what `seq_len` has cut.

        Args:
            left_out: samples that cannot be read, which do not count, by index in the batch, and why.

        Raises:
            SampleError: no sample of the batch is left, or none has a target; or `[data] on_no_target` says stop.
        """
        if len(left_out) == len(drawn):
            raise none_readable(step, left_out)
        without = [i for i in np.flatnonzero(drawn.metas.num_targets == 0).tolist() if i not in left_out]
        seq_len = self.recipe.training.seq_len
        if without:
            text = describe_without_targets(drawn, without, seq_len)
            if len(without) + len(left_out) == len(drawn):
                raise SampleError(f"step {step}: no sample of the global batch has a target token: {text}")
            if self.recipe.data.on_no_target == "stop":
                raise SampleError(
                    f"step {step}: {len(without)} of {len(drawn)} samples add nothing to the loss: {text}; mend or "
                    'remove them, or let them be counted: data.on_no_target = "count"'
                )
            self.reporter.warn_once(
                "samples_without_target",
                f"step {step}: {len(without)} of {len(drawn)} samples add nothing to the loss: {text}; from here on "
                "they are only counted, as samples_without_target in metrics.jsonl",
            )
        if cut := describe_cut(drawn, seq_len):
            self.reporter.warn_once(
                "cut",
                f"step {step}: {cut}; from here on only counted, as tokens_dropped and media_dropped in metrics.jsonl",
            )
        return len(without)

    def over_in_flight(self, step: int, schedule: Schedule) -> int:
        """By how much the schedule exceeds the recipe's `bubble_fill_in_flight`."""
        over = over_in_flight(self.recipe, schedule)
        if over:
            where = self.recipe.schedule_place("bubble_fill_in_flight")
            cap = self.recipe.schedule_key("bubble_fill_in_flight")
            self.reporter.warn_once(
                "over_in_flight",
                f"step {step}: {where} = {cap}: the routes of this batch need {cap + over} microbatches at a time; "
                "from here on such steps are only counted, as over_in_flight in metrics.jsonl",
            )
        return over
