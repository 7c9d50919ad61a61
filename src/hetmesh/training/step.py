"""One step over a global batch: forward and backward of all modules, one verdict on finite values, and gradients
divided by what losses count and clipped. The update of parameters is the caller's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hetmesh.balance import BatchPlan
from hetmesh.data.drawn import describe_without_targets
from hetmesh.errors import SampleError
from hetmesh.training.gradients import GlobalGradients
from hetmesh.training.non_finite import describe_non_finite
from hetmesh.training.unreadable import describe_unreadable, leave_out_unreadable
from hetmesh.training.upcoming import PlannedStep

if TYPE_CHECKING:
    from hetmesh.training.job import Job


@dataclass(frozen=True)
class StepResult:
    """What a forward and backward of a global batch gave; equal on all ranks.

    Attributes:
        step: 1 for the first global batch that the job has drawn.
        loss: the weighted sum of `losses`.
        losses: by module, per unit that its loss counts in the global batch; those that have none in it are left out.
        grad_norm: 2-norm of the gradient of that over all modules, before clipping, replicas counted once.
        targets, samples: of the global batch.
        samples_skipped: of these, those that could not be read (`[data] on_bad_sample = "skip"`); they add nothing.
        samples_without_target: of these, those that add nothing to the loss.
        skipped: what was not finite, and on which ranks, so that the step is skipped; empty if everything was.
        stop_requested: whether any rank asked to stop after this step.
    """

    step: int
    loss: float
    grad_norm: float
    targets: int
    samples: int
    losses: Mapping[str, float] = field(default_factory=dict)
    samples_skipped: int = 0
    samples_without_target: int = 0
    skipped: str = ""
    stop_requested: bool = False

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are. Otherwise gradients are left as they came: do not take an optimizer's step."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class LossWeights:
    """How the summed losses of one batch make one: each is divided by what it counts there, and weighed.

    Gradients are sums until the end of a step, when all are divided by one number, `divisor`: what the LLM's loss
    counts, or the first that counts anything; 0: nothing does. So with one loss no gradient is multiplied before.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self.specs, self.counts = plan.graph.losses, plan.loss_counts
        of_llm = self.counts.get(plan.graph.llm.name, 0)
        self.divisor = of_llm or next((count for count in self.counts.values() if count), 0)

    @property
    def of_sums(self) -> dict[str, float]:
        """By what the gradients of each sum are multiplied before all are divided by `divisor`."""
        return {
            name: spec.weight * (self.divisor / count) if (count := self.counts[name]) else 0.0
            for name, spec in self.specs.items()
        }

    def losses(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Per unit, of those that count any."""
        return {name: total / count for name, total in sums.items() if (count := self.counts[name])}

    def total(self, losses: Mapping[str, float]) -> float:
        """The weighted sum; what is only measured need not be finite."""
        return sum(weight * loss for name, loss in losses.items() if (weight := self.specs[name].weight))


class TrainingStep:
    """Takes the steps of a job: `draw`, then `run`."""

    def __init__(self, job: Job) -> None:
        self.job, self.gradients = job, GlobalGradients(job.runtime, job.parameters(), job.counted)

    def draw(self) -> PlannedStep:
        """The next step of the job. Collective where samples may be skipped. Raises SampleError: a sample's metadata is
        malformed, or could be read on some ranks only."""
        world, upcoming = self.job.world, self.job.upcoming
        with world.watchdog.watching(f"metadata of the samples of step {upcoming.number + 1}"):
            planned = upcoming.take()
        if self.job.recipe.data.on_bad_sample != "skip":
            return planned
        plan, unreadable = leave_out_unreadable(planned.feed, world)
        return replace(planned, plan=plan, unreadable=unreadable)

    def run(self, planned: PlannedStep, max_norm: float, computed: Callable[[], bool] = lambda: False) -> StepResult:
        """Leave the clipped gradient per target in `.grad` of every parameter, in place of what is there. Collective.

        Args:
            max_norm: clips the gradient of all modules together; 0 does not.
            computed: called when this rank has computed and sent everything, before ranks sum losses and norms; returns
                whether it asks all ranks to stop after this step.

        Raises:
            SampleError: a sample cannot be read, or no sample of the batch has a target.
            NonFiniteError: as `NonFiniteSteps.skip`. On all ranks.
        """
        job, step, weights = self.job, planned.number + 1, LossWeights(planned.plan)
        if not weights.divisor:
            raise self._nothing_to_learn(planned)
        self.gradients.clear()
        sums = job.runtime.run(
            planned.schedule,
            planned.plan,
            planned.feed,
            step=planned.number,
            transfers=planned.transfers,
            weights=weights.of_sums,
            settled=False,
        )
        stop = computed()
        own = {name: loss if job.counts_loss(name) else 0.0 for name, loss in sums.items()}
        totals, norm, stop = self.gradients.settle(list(own.values()), stop)
        losses = weights.losses(dict(zip(own, totals, strict=True)))
        result = StepResult(
            step,
            weights.total(losses),
            norm / weights.divisor,
            planned.plan.num_targets,
            len(planned.drawn),
            losses,
            len(planned.unreadable),
            len(planned.without_target),
            stop_requested=stop,
        )
        if result.finite:  # equal on all ranks, so all do the same
            job.non_finite.finite()
            job.first_steps.check()
            self.gradients.normalise(weights.divisor, result.grad_norm, max_norm)
            return result
        where = describe_non_finite(job.root, own, job.world)
        values = f"(loss {result.loss:.4g}, grad norm {result.grad_norm:.4g})"
        return replace(result, skipped=job.non_finite.skip(f"step {step}: {where} are not finite {values}"))

    def _nothing_to_learn(self, planned: PlannedStep) -> SampleError:
        step, drawn, reasons = planned.number + 1, planned.drawn, list(planned.unreadable.values())
        if len(reasons) == len(drawn):
            return SampleError(
                f"step {step}: no sample of the global batch can be read: {describe_unreadable(reasons)}, or take a "
                f"larger batch: training.global_batch_size is {len(drawn)}"
            )
        text = describe_without_targets(drawn, planned.without_target, self.job.recipe.training.seq_len)
        return SampleError(f"step {step}: no sample of the global batch has a target token: {text}")
