"""The worker pool: results by rank, and a clear error and a fresh start after every kind of failure."""

import multiprocessing
import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from hetmesh.testing.pool import WorkerError, WorkerPool

pytestmark = pytest.mark.slow


def _sum(rank, x):
    y = x * (rank + 1)
    dist.all_reduce(y)
    return y


def _threads_of_fork_server(rank):
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def _identity(rank, value):
    return rank, value


def _fail(rank, bad, error):
    if rank == bad:
        raise error
    dist.barrier()  # the others hang here, as they would in a real failure


class _Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def _fail_unpicklable(rank):
    if rank == 1:
        raise _Unpicklable("left", "right")
    dist.barrier()


def _leave(rank):
    sys.exit(3)


def _die(rank, victim, number=signal.SIGKILL):
    if rank == victim:
        os.kill(os.getpid(), number)
    dist.barrier()


def _send_too_much(rank):
    if rank == 0:
        dist.send(torch.zeros(64), 1)
    elif rank == 1:
        dist.recv(torch.zeros(8), 0)
    dist.barrier()


def _stall(rank, staller):
    if rank == staller:
        signal.pause()


def _backward(rank):
    x = torch.ones(3, requires_grad=True)
    (x * rank).sum().backward()
    return x.grad


_remembered = []


def _remember(rank, value):
    _remembered.append(value)
    return list(_remembered)


def _draw(rank):
    return torch.rand(1).item(), torch.get_default_dtype()


def _set_default_dtype(rank):
    torch.set_default_dtype(torch.float64)


@pytest.fixture(scope="module")
def own_pool():
    """A pool that this file may break: rebuilding it does not cost the others their cached groups."""
    with WorkerPool(2) as pool:
        yield pool


def test_results_come_by_rank_and_collectives_work(pool4):
    for result in pool4.run(_sum, torch.ones(3)):
        assert torch.equal(result, torch.full((3,), 10.0))
    assert pool4.run(_identity, "x") == [(rank, "x") for rank in range(4)]


def test_one_process_has_all_tests_with_workers(pool, request):
    """pytest-xdist says nothing where it does not know the groups of tests, and every process then starts pools."""
    if hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith("@pool")


def test_many_cases_in_one_message(own_pool):
    assert own_pool.run_many(_identity, [(i,) for i in range(3)]) == [[(0, i), (1, i)] for i in range(3)]
    assert own_pool.run_many(_identity, []) == []


def test_workers_keep_state_but_not_seeds_or_default_dtype(own_pool):
    first, second = own_pool.run(_remember, 1), own_pool.run(_remember, 2)
    assert [len(s) - len(f) for f, s in zip(first, second, strict=True)] == [1, 1]
    before = own_pool.run(_draw)
    own_pool.run(_set_default_dtype)
    assert own_pool.run(_draw) == before


def test_autograd_works_in_workers_after_a_backward_in_the_parent(own_pool):
    own_pool.close()
    _backward(0)  # workers forked from here could not run backward: torch refuses
    assert [g.tolist() for g in own_pool.run(_backward)] == [[0.0] * 3, [1.0] * 3]


def test_an_exception_keeps_its_type_and_names_rank_and_case(own_pool):
    own_pool.run(_identity, 0)
    starts = own_pool.starts
    with pytest.raises(KeyError, match="lost") as caught:
        own_pool.run(_fail, 1, KeyError("lost"))
    note = "".join(caught.value.__notes__)
    assert "worker 1, case 0 of" in note
    assert "raise error" in note  # the worker's own traceback
    assert own_pool.run(_identity, 5) == [(0, 5), (1, 5)]
    assert own_pool.starts == starts + 1


def test_the_note_names_the_failing_case(own_pool):
    with pytest.raises(ZeroDivisionError) as caught:
        own_pool.run_many(_fail, [(-1, None), (-1, None), (0, ZeroDivisionError())])
    assert "worker 0, case 2 of" in caught.value.__notes__[0]


def test_an_exception_that_does_not_unpickle_is_still_reported(own_pool):
    with pytest.raises(WorkerError, match="left and right") as caught:
        own_pool.run(_fail_unpicklable)
    assert caught.value.ranks == (1,)


def test_a_worker_calling_exit_does_not_end_the_parent(own_pool):
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        own_pool.run(_leave)


def test_a_dead_worker_is_named_with_its_signal(own_pool):
    with pytest.raises(WorkerError, match=r"worker 1 died without a Python exception \(SIGKILL\)") as caught:
        own_pool.run(_die, 1)
    assert caught.value.ranks == (1,)
    assert own_pool.run(_identity, 5) == [(0, 5), (1, 5)]


def test_a_worker_that_breaks_says_where_it_was(own_pool):
    with pytest.raises(WorkerError, match=r"worker 0 died without a Python exception \(SIGSEGV\)(.|\n)*in _die"):
        own_pool.run(_die, 0, signal.SIGSEGV)


def test_a_size_mismatch_that_kills_gloo_is_reported(own_pool):
    with pytest.raises((WorkerError, RuntimeError)):
        own_pool.run(_send_too_much, timeout=20)
    assert own_pool.run(_identity, 5) == [(0, 5), (1, 5)]


def test_a_hang_names_the_worker_and_shows_its_stack(own_pool):
    own_pool.run(_identity, 0)
    with pytest.raises(WorkerError, match=r"no answer within 2 s from worker 1;") as caught:
        own_pool.run(_stall, 1, timeout=2.0)
    assert caught.value.ranks == (1,)
    assert "in _stall" in str(caught.value)
    assert own_pool.run(_identity, 5) == [(0, 5), (1, 5)]


def test_a_worker_killed_between_calls_is_replaced(own_pool):
    own_pool.run(_identity, 0)
    starts = own_pool.starts
    process = own_pool._workers[1][0]
    process.kill()
    process.join()
    assert own_pool.run(_identity, 5) == [(0, 5), (1, 5)]
    assert own_pool.starts == starts + 1


def test_close_leaves_no_process_and_the_pool_starts_again():
    pool = WorkerPool(1)
    assert pool.run(_identity, 1) == [(0, 1)]
    process = pool._workers[0][0]
    pool.close()
    assert not process.is_alive()
    assert process not in multiprocessing.active_children()
    assert pool.run(_identity, 2) == [(0, 2)]
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_are_forked_from_a_process_with_one_thread(pool4):
    assert pool4.run(_threads_of_fork_server) == [1] * 4


def test_functions_without_a_name_are_refused():
    pool = WorkerPool(1)
    with pytest.raises(TypeError, match="top level of a module"):
        pool.run(lambda rank: rank)
    with pytest.raises(ValueError, match="at least one worker"):
        WorkerPool(0)
    assert pool.starts == 0
