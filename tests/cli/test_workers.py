"""Worker processes: none left behind, no fork beside a thread, the first cause of a failure."""

import os
import signal
import sys
import threading
import time

import pytest

from hetmesh.cli import workers
from hetmesh.cli.workers import Failure, Workers, first_cause


def leave(rank, status):
    sys.exit(status if rank == 1 else 0)


def fail(rank):
    if rank == 0:
        raise KeyError("x")
    time.sleep(600)


def fail_at_length(rank):
    raise ValueError("x" * 1_000_000)


def ignore_sigterm(rank, ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(ready, b"x")
    time.sleep(600)


def exit_with_hangup_ignored(rank):
    sys.exit(10 + (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN))


def test_no_fork_beside_a_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="threads in the process that forks"), Workers("fork", 1, leave, (0,)):
            raise AssertionError("it forked")
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(("status", "failure"), [(0, None), (7, "ended with exit status 7 and without an exception")])
def test_the_exit_status_of_a_worker(status, failure):
    with Workers("spawn", 2, leave, (status,)) as started:
        found = started.join()
    assert (found and (found.rank, found.message.partition(";")[0])) == (failure and (1, failure))


@pytest.mark.slow
def test_an_exception_ends_the_others():
    before = signal.getsignal(signal.SIGTERM)
    with Workers("spawn", 2, fail) as started:
        processes = [process for process, _ in started._running.values()]
        failure = started.join()
    assert (failure.rank, failure.message) == (0, "KeyError: 'x'")
    assert "in fail" in failure.traceback
    assert [process.exitcode for process in processes] == [1, -signal.SIGKILL]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_long_report_does_not_wait_for_a_reader():
    with Workers("spawn", 1, fail_at_length) as started:
        assert started.join().message.startswith("ValueError: xxx")


def test_who_does_not_heed_sigterm_is_killed():
    script = (
        "import os, sys; from hetmesh.cli import workers; from test_workers import ignore_sigterm; "
        "read, write = os.pipe(); "
        "started = workers.Workers('fork', 1, ignore_sigterm, (write,)).__enter__(); "
        "(process, _), = started._running.values(); os.read(read, 1); started.end(); sys.exit(-process.exitcode)"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    assert (
        os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": path}) == 9
    )


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Workers("spawn", 1, exit_with_hangup_ignored) as started:
            assert started.join() == Failure(0, workers.how_it_ended(11))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_who_lost_a_peer_is_not_the_cause():
    lost = Failure(0, "BoundaryError: SEND0: boundary 'a->b': rank 0 lost rank 2: its process has ended", "Traceback")
    cause = Failure(2, "SampleError: sample 'x': its image is broken", "Traceback")
    assert lost.lost_peer
    assert first_cause([lost, cause]) == cause
