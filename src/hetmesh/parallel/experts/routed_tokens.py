"""Which samples the tokens of a microbatch belong to, as mixture-of-experts blocks need it, and what they noted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from hetmesh.errors import BoundaryError
from hetmesh.parallel.random_state import current_microbatch, current_step

KEYS = ("token_samples", "sample_tokens", "sample_weights")
"""Of the batch of a packed lane (`hetmesh.models.packing.lane_samples`)."""


Load = tuple[Tensor, Tensor]
"""Of one block: the load-balancing loss of this rank's tokens, in targets, without its coefficient; and how many of
them went to each expert, `[experts]`."""


@dataclass(frozen=True)
class LaneSamples:
    """The real tokens of one rank: what follows them in a block's input is padding, and is not routed.

    Attributes:
        of_token: int64 `[tokens]`: the sample of each token that the rank keeps, by its place in the lane.
        tokens: int64 `[samples]`: tokens of each sample of the lane, on all ranks that share them.
        weights: float64 `[samples]`: what each sample's load-balancing loss counts, in targets: over all samples of a
            global batch they sum to its targets.
    """

    of_token: Tensor
    tokens: Tensor
    weights: Tensor


class RoutedTokens:
    """What the mixture-of-experts blocks of one module share, by microbatch: a block may be computed again later."""

    def __init__(self) -> None:
        self._samples: dict[int, LaneSamples] = {}
        self._step = 0
        self._loads: dict[tuple[int, int], Load] = {}

    def note(self, batch: Mapping[str, Tensor]) -> None:
        """Take what a batch says of the microbatch that is about to be computed. Raises BoundaryError if its samples
        are not packed in one row, so that padding could not be told from tokens."""
        if missing := [key for key in KEYS if key not in batch]:
            raise BoundaryError(f"experts need the samples of a lane in one row, but its batch has no {missing}")
        self._samples[current_microbatch()] = LaneSamples(*(batch[key] for key in KEYS))

    @property
    def samples(self) -> LaneSamples:
        """Those of the microbatch that is computed, or computed again."""
        return self._samples[current_microbatch()]

    def count(self, block: int, load: Load) -> None:
        """Keep the load of one block in this microbatch; what an earlier step left is dropped."""
        if current_step() != self._step:
            self._step = current_step()
            self._loads.clear()
        self._loads[current_microbatch(), block] = load  # computed again, it is the same

    def loads(self) -> dict[int, Load]:
        """Those of the last step, summed over microbatches, by number of the block; nothing is read."""
        sums: dict[int, Load] = {}
        for (_, block), load in sorted(self._loads.items(), key=lambda item: item[0]):
            before = sums.get(block)
            sums[block] = load if before is None else (before[0] + load[0], before[1] + load[1])
        return sums


def routed_tokens(module: nn.Module) -> RoutedTokens | None:
    """What the mixture-of-experts blocks of `module` share; None where it has none."""
    return getattr(module, "hetmesh_experts", None)
