"""The watchdog: what does not end by itself is named."""

import math
import threading
import time

from hetmesh.boundary.backend import Nccl
from hetmesh.boundary.watchdog import Watchdog, _Watch


def test_an_operation_that_outlasts_its_timeout_is_named():
    said, fired = [], threading.Event()

    def on_expiry(message):
        said.append(message)
        fired.set()

    watchdog = Watchdog(0.05, on_expiry)
    with watchdog.watching("boundary 'vision->llm', microbatch 3"):
        assert fired.wait(10)
    watchdog.close()
    assert said == ["watchdog: boundary 'vision->llm', microbatch 3 did not finish within 0.05 s"]


def test_operations_that_end_are_not_reported():
    said = []
    watchdog = Watchdog(60, said.append)
    for _ in range(3):
        with watchdog.watching("outer"), watchdog.watching("inner"):
            pass
    watchdog.close()
    assert said == []


def test_what_is_stuck_is_named_within_the_timeout_and_five_seconds():
    """And not before waits that raise by themselves: they know more. By its own clock; nothing here waits."""
    for timeout in (0.5, 5.0, 300.0):
        watchdog = Watchdog(timeout)
        watchdog._watched, watchdog._since = [_Watch(watchdog, "boundary 'vision->llm'", None)], 100.0
        assert watchdog._late(100 + timeout + 0.4) is None
        assert watchdog._late(100 + timeout + 4) is not None  # it looks every half second


def test_progress_inside_begins_anew_and_the_innermost_is_named():
    watchdog, started = Watchdog(1000), time.monotonic()
    with watchdog.watching("llm.0 F1"):
        watchdog._since = started - 2000
        assert "llm.0 F1 did not" in watchdog._late(time.monotonic())
        with watchdog.watching("boundary 'vision->llm'"):
            assert watchdog._late(time.monotonic()) is None
            late = watchdog._late(started + 2000)
        assert watchdog._late(time.monotonic()) is None
    watchdog.close()
    assert late == "watchdog: boundary 'vision->llm' did not finish within 1000 s (during llm.0 F1)"


class _Seen(list):
    """What is watched, looked at right after every change, where the thread may look too."""

    def __init__(self, watchdog):
        super().__init__()
        self.watchdog, self.said = watchdog, []

    def append(self, watch):
        super().append(watch)
        self.look()

    def remove(self, watch):
        super().remove(watch)
        self.look()

    def look(self):
        self.said.append(self.watchdog._late(time.monotonic()))


def test_what_was_long_before_is_not_counted_when_something_begins_or_ends():
    watchdog = Watchdog(1000)
    watchdog._watched = seen = _Seen(watchdog)
    watchdog._since = -5000.0  # nothing was watched for long
    with watchdog.watching("training"):
        with watchdog.watching("the first step", math.inf):
            watchdog._since -= 5000  # it may take as long as it likes
        assert seen.said == [None] * 3
    watchdog.close()


class Never:
    def is_completed(self):
        return False


def test_a_work_that_is_expected_is_named_before_nccl_ends_the_process():
    """Both count from posting."""
    for timeout in (0.5, 5.0, 300.0):
        watchdog = Watchdog(timeout)
        watchdog._expected.append((100.0, Never(), "llm.0->llm.1, microbatch 2: rank 1, waiting for rank 3"))
        assert watchdog._late(100 + timeout) is None
        # it looks every half second, and the longest that NCCL may be late to notice is not known
        told = watchdog._late(100 + Nccl().group_timeout(timeout).total_seconds() - min(0.5, timeout / 4))
        assert told is not None
        assert "rank 1, waiting for rank 3" in told
