"""SplitSources that go wrong at one sample, for tests that run whole jobs."""

import os
import signal
import time
from collections.abc import Collection

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
