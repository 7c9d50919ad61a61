"""Steps whose loss or gradient is not finite: where that was seen, and whether the run goes on without them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.errors import NonFiniteError
from hetmesh.formatting import ranks_text
from hetmesh.parallel import local_gradient
from hetmesh.parallel.gradient_sums import local_part
from hetmesh.recipe import sections as sections


class NonFiniteSteps:
    """Counts those of one run, and ends it as `[training]` asks: with `on_non_finite = "stop"` at the first, with
    "skip" where more than `max_consecutive_non_finite` follow each other (as `max_consecutive_errors` of optax's
    `apply_if_finite`, which then takes the next one).

    Attributes:
        count: so far.
        in_a_row: the last consecutive ones.
        hint: what else an error says.
    """

    def __init__(self, keys: sections.Training) -> None:
        self.keys = keys
        self.count = self.in_a_row = 0
        self.hint = ""

    def finite(self) -> None:
        """A step was."""
        self.in_a_row = 0

    def skip(self, what: str) -> str:
        """A step was not: count it.

        Args:
            what: which step, what of it, and on which ranks.

        Returns:
            A line for the log.

        Raises:
            NonFiniteError: the run ends here.
        """
        if self.keys.on_non_finite == "stop":
            raise NonFiniteError(
                f"{what}; no parameter was changed by it. Lower optimizer.lr or training.max_norm, look at the "
                f'samples, or leave such steps out: training.on_non_finite = "skip".{self.hint}'
            )
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        if self.in_a_row > self.keys.max_consecutive_non_finite:
            raise NonFiniteError(
                f"{what}; {self.in_a_row} steps in a row were not, and training.max_consecutive_non_finite = "
                f"{self.keys.max_consecutive_non_finite}: no parameter was changed by them, so more of them would not "
                f"help. Lower optimizer.lr or training.max_norm, or go on from an earlier checkpoint.{self.hint}"
            )
        return f"{what}: skipped, parameters stay as they are"


def describe_non_finite(root: nn.Module, losses: Mapping[str, Tensor | float], world: World) -> str:
    """What is not finite, and where, e.g. `"the loss (rank 2) and gradients of vision (rank 0-1)"`.

    Collective over all ranks, in the rare step whose sum was not finite: the usual one needs a single number.

    Args:
        root: the modules of this rank, by name.
        losses: summed, of this rank, by module.
    """
    everyone = gather_objects(_found(root, losses), world, "names of modules whose gradients are not finite")
    ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(everyone):
        for what in found:
            ranks.setdefault(what, []).append(rank)
    if not ranks:
        return "the gradient norm, too large for a number,"
    return " and ".join(f"{what} (rank {ranks_text(ranks[what])})" for what in sorted(ranks, reverse=True))


@torch.no_grad()
def _found(root: nn.Module, losses: Mapping[str, Tensor | float]) -> list[str]:
    of = " of {}" if len(losses) > 1 else ""
    wrong = (name for name, loss in losses.items() if not torch.isfinite(torch.as_tensor(loss)))
    found = [f"the loss{of.format(name)}" for name in wrong]
    for name, module in root.named_children():
        parameters = list(module.parameters())
        if not all(bool(torch.isfinite(local_part(p)).all()) for p in parameters):
            found.append(f"parameters of {name}")  # an earlier step has broken them, or what they were loaded from
        gradients = [g for g in map(local_gradient, parameters) if g is not None]
        if not all(bool(torch.isfinite(g).all()) for g in gradients):
            found.append(f"gradients of {name}")
    return found
