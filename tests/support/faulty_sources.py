"""SplitSources that go wrong at one sample, for tests that run whole jobs."""

import os
import signal
import time
from collections.abc import Collection

from torch.optim.optimizer import register_optimizer_step_pre_hook

from hetmesh.data.digits import DigitsSource
from hetmesh.data.source import Sample


class FaultyDigits(DigitsSource):
    """The digits, but rank `rank` comes to grief when it loads training sample `at`.

    Args:
        fault: `kill` (the process and its whole process group), `stall` (forever), `drop` (one image less than the
            sample's placeholders), or nothing.
    """

    def __init__(self, split: str = "train", fault: str = "", at: int = -1, rank: int = 0) -> None:
        super().__init__(split)
        self.fault, self.at, self.rank = fault, at, rank

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        sample = super().load(index, kinds)
        if index != self.at or self.split != "train" or int(os.environ.get("RANK", 0)) != self.rank:
            return sample
        if self.fault == "kill":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        if self.fault == "stall":
            while True:
                time.sleep(3600)
        if self.fault == "drop":
            return Sample(sample.id, sample.tokens, {"image": sample.media.get("image", ())[:-1]})
        return sample


class FailingUpdate(DigitsSource):
    """The digits, in a process whose optimizers fail from the second step on if it is rank `rank`."""

    def __init__(self, split: str = "train", rank: int = 1) -> None:
        super().__init__(split)
        self.updates = 0
        if split == "train" and int(os.environ.get("RANK", -1)) == rank:
            register_optimizer_step_pre_hook(self._fail)

    def _fail(self, *_: object) -> None:
        self.updates += 1
        if self.updates == 3:  # the first one, before any training, makes the optimizer's state
            raise RuntimeError("no memory for the update")
