"""The watchdog: what does not end by itself is named."""

import threading

from hetmesh.boundary.watchdog import Watchdog


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
