"""A loss is a sum. It is divided once per step, by what it counts of the whole global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from hetmesh.data.source import Source, abilities_of
from hetmesh.errors import LossError, RecipeError
from hetmesh.graph import ModuleGraph
from hetmesh.parallel import CrossEntropy, ParallelModule
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.named_loss import named_loss

CustomLoss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""A custom loss of the LLM: logits `[targets, vocab]` of this rank's lane and microbatch, and the batch of the LLM, in
which `batch["targets"]` are the true tokens, and `batch["values.NAME"]`, float64, what each has of a value of its
sample -> the SUM over these targets, a scalar; a connected 0 without any. Every rank with logits calls it in every
microbatch.
Of another module: what its last stage returns `[rows, features]`, and the batch of that module, in which
`batch["targets"]` are what it is to be compared with, where the module has targets."""

CustomLosses = CustomLoss | Mapping[str, CustomLoss]
"""That of the LLM, or those of some modules by name."""


def sum_squared_error(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The squared differences of `output` from `batch["targets"]`, both `[rows, features]`, as their mean over features
    summed over rows."""
    targets = batch["targets"]
    if output.shape != targets.shape:
        raise LossError(f"its output {tuple(output.shape)} and its targets {tuple(targets.shape)} have other shapes")
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    return (output - targets.to(output.dtype)).square().mean(-1).sum()


def of_counted(loss: CustomLoss) -> CustomLoss:
    """`loss` of the rows in `batch["counted"]` alone, where it is there: others are of samples that cannot be read."""

    def of_rows(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        if (counted := batch.get("counted")) is None:
            return loss(output, batch)
        return loss(output[counted], _rows_of(batch, counted, len(counted)))

    return of_rows


def _rows_of(batch: Mapping[str, Tensor], which: slice | Tensor, n: int) -> dict[str, Tensor]:
    """Of each tensor with a row for each of `n` those."""
    return {key: v[which] if isinstance(v, Tensor) and v.ndim and len(v) == n else v for key, v in batch.items()}


def by_module(loss: CustomLosses | None, graph: ModuleGraph) -> dict[str, CustomLoss]:
    """Custom losses by module. Raises RecipeError: of a module that has no loss, or no function."""
    given = {} if loss is None else dict(loss) if isinstance(loss, Mapping) else {graph.llm.name: loss}
    if wrong := sorted(given.keys() - graph.losses.keys()):
        raise RecipeError(f"loss of {wrong[0]!r}: the modules with a loss are {', '.join(graph.losses)}")
    for name, each in given.items():
        if not callable(each):
            raise RecipeError(f"loss of {name!r}: must be a function (output, batch) -> summed loss, got {each!r:.80}")
    return given


def losses_of_recipe(recipe: Recipe, graph: ModuleGraph, custom: CustomLosses | None) -> dict[str, CustomLoss]:
    """Custom losses by module: those given, and those that the recipe names. Raises RecipeError: as `by_module`, or one
    cannot be imported."""
    found = by_module(custom, graph)
    for name, module in recipe.modules.items():
        if name not in found and module.loss is not None and ":" in module.loss.kind:
            found[name] = named_loss(f"modules.{name}.loss.kind", module.loss)
    return found


def check_values(source: Source, losses: Collection[str], llm: str) -> None:
    """Raise RecipeError where samples have values (`SourceAbilities.values`) and the loss is cross-entropy. `losses`:
    modules with a custom one."""
    if llm not in losses and (names := list(abilities_of(source).values)):
        raise RecipeError(
            f"[data.options] values = {names}: cross-entropy reads none and weighs all targets alike; give a loss that "
            "reads them, hetmesh.train(recipe, loss=f), or leave them out"
        )


def module_losses(
    graph: ModuleGraph, modules: Mapping[str, ParallelModule], custom: Mapping[str, CustomLoss]
) -> dict[str, CustomLoss]:
    """The loss of each module that has one, as its last stage calls it. `modules`: of this rank."""
    found: dict[str, CustomLoss] = {}
    for name, spec in graph.losses.items():
        if spec.unit != "tokens":
            found[name] = of_counted(CheckedRowLoss(custom[name]) if name in custom else sum_squared_error)
        elif name in custom:
            found[name] = CheckedLoss(custom[name])
        else:
            own = modules.get(name)
            found[name] = CrossEntropy(None if own is None else own.vocabulary)
    return found


class CheckedLoss:
    """A custom loss, refused where it is no sum: a mean would weigh targets by their microbatch and rank. Raises
    LossError: it gives something else than a scalar that depends on the logits; or, of the first batch with several
    targets, something else than the sum of what it gives for two halves of them."""

    of, over = "logits", "batch['targets']"
    mean_hint = "a mean is taken once, over the global batch, by hetmesh"

    def __init__(self, loss: CustomLoss) -> None:
        self.loss = loss
        self._tried = False

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        value = self.loss(output, batch)
        name = f"loss {getattr(self.loss, '__qualname__', type(self.loss).__name__)}"
        if not isinstance(value, Tensor) or value.shape != () or not value.is_floating_point():
            given = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise LossError(f"{name}: must return a scalar tensor, the sum over {self.over}, got {given}")
        if not isinstance(output, Tensor):
            return value
        if output.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
            raise LossError(f"{name}: its result does not depend on the {self.of}, so nothing can be trained by it")
        if not self._tried and output.ndim and len(output) > 1:
            self._tried = True
            self._compare_halves(name, output.detach(), batch, value.detach())
        return value

    @torch.no_grad()
    def _compare_halves(self, name: str, output: Tensor, batch: Mapping[str, Tensor], value: Tensor) -> None:
        n, whole, halves = len(output), float(value), list[float]()
        for span in (slice(None, n // 2), slice(n // 2, None)):
            if (half := self.part_of(batch, span, n)) is None:
                return
            halves.append(float(self.loss(output[span], half)))
        tolerance = max(1e-3, 16 * torch.finfo(value.dtype).eps)  # of a sum's rounding; a mean is off by about half
        if math.isfinite(whole) and abs(sum(halves) - whole) > tolerance * max(map(abs, (whole, *halves))):
            raise LossError(
                f"{name}: must be a sum over {self.over}, but gives {whole:.6g} for {n} of them, and {halves[0]:.6g} + "
                f"{halves[1]:.6g} for the two halves; {self.mean_hint}"
            )

    def part_of(self, batch: Mapping[str, Tensor], span: slice, n: int) -> Mapping[str, Tensor] | None:
        """The batch of some of the `n` outputs; None if it cannot be split."""
        of_targets = (key for key in batch if key in _OF_TARGETS or key.startswith("values."))
        return {**batch, **{key: batch[key][span] for key in of_targets}}


class CheckedSampleLoss(CheckedLoss):
    """A `CheckedLoss` of a Pipeline, over samples in place of targets."""

    of, over = "output", "its samples"
    mean_hint = "for a mean divide once, by divide_by of Pipeline.step"

    def part_of(self, batch: Mapping[str, Tensor], span: slice, n: int) -> Mapping[str, Tensor] | None:
        """The batch of some of the `n` samples; None if the last part returns no single row of a sample."""
        if any(len(value) != n for value in batch.values() if isinstance(value, Tensor)):
            return None
        return {key: value[span] if isinstance(value, Tensor) else value for key, value in batch.items()}


class CheckedRowLoss(CheckedLoss):
    """A `CheckedLoss` of a module whose output has a row per row of its targets."""

    of, over = "output", "its rows"

    def part_of(self, batch: Mapping[str, Tensor], span: slice, n: int) -> Mapping[str, Tensor] | None:
        """The batch of some of the `n` rows; None if it is not compared with a target of each."""
        targets = batch.get("targets")
        if not isinstance(targets, Tensor) or len(targets) != n:
            return None
        return _rows_of(batch, span, n)


_OF_TARGETS = ("targets", "target_positions", "target_index")
