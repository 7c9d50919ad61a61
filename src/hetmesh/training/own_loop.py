"""A training loop of one's own: a step of a job without the optimizer's, which is the caller's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hetmesh.data.loader import describe_without_targets
from hetmesh.errors import SampleError
from hetmesh.training.gradients import clip_factor, scale
from hetmesh.training.non_finite import describe_non_finite
from hetmesh.training.skip import leave_out_unreadable
from hetmesh.training.step_notices import none_readable

if TYPE_CHECKING:
    from hetmesh.training.job import Job


@dataclass(frozen=True)
class StepResult:
    """What a forward and backward of a global batch gave; equal on all ranks.

    Attributes:
        step: 1 for the first global batch that the job has drawn.
        loss: per valid target of the global batch.
        grad_norm: 2-norm of the gradient of that over all modules, before clipping, replicas counted once.
        targets, samples: of the global batch.
        samples_skipped: of these, those that could not be read (`[data] on_bad_sample = "skip"`); they add nothing.
        samples_without_target: of these, those that add nothing to the loss.
    """

    step: int
    loss: float
    grad_norm: float
    targets: int
    samples: int
    samples_skipped: int = 0
    samples_without_target: int = 0

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are. Otherwise gradients are left as they came: do not take an optimizer's step."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def forward_backward(job: Job, max_norm: float) -> StepResult:
    """`Job.forward_backward`."""
    step = job.loader.step
    with job.world.watchdog.watching(f"metadata of the samples of step {step + 1}"):
        planned = job.upcoming.take()
    drawn, plan = planned.drawn, planned.plan
    left_out: dict[int, str] = {}
    if job.recipe.data.on_bad_sample == "skip":
        plan, left_out = leave_out_unreadable(planned.feed, job.world)
    if len(left_out) == len(drawn):
        raise none_readable(step + 1, left_out)
    targets = plan.num_targets
    if not targets:
        told = describe_without_targets(drawn, range(len(drawn)), job.recipe.training.seq_len)
        raise SampleError(f"step {step + 1}: no sample of the global batch has a target token: {told}")
    parameters = job.parameters()
    for parameter in parameters:
        parameter.grad = None
    loss_sum = job.runtime.run(
        planned.schedule, plan, planned.feed, step=step, transfers=planned.transfers, settled=False
    )
    loss, grad_norm, _ = job.totals(loss_sum, targets)
    without = [i for i in np.flatnonzero(drawn.metas.num_targets == 0).tolist() if i not in left_out]
    result = StepResult(step + 1, loss, grad_norm, targets, len(drawn), len(left_out), len(without))
    if result.finite:
        job.non_finite.finite()
        job.first_steps.check()
        # Gradients are sums over the whole batch; this is the only place where they are normalised.
        scale(parameters, clip_factor(grad_norm, max_norm) / targets)
        return result
    where = describe_non_finite(job.root, loss_sum if job.counts_loss else 0.0, job.world)
    job.non_finite.skip(f"step {step + 1}: {where} are not finite (loss {loss:.4g}, grad norm {grad_norm:.4g})")
    return result
