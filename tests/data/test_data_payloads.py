"""Payloads: workers load what this process would; those that die or hang are errors that name the sample."""

import errno
import gc
import os
import signal
import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hetmesh.data import DigitsSource, Sample
from hetmesh.data.payload_workers import InWorkers, packed, unpacked
from hetmesh.data.payloads import Payloads, SplitSources, Unreadable, Wanted
from hetmesh.data.source import COSTS
from hetmesh.errors import LoaderError, SampleError
from hetmesh.models.collate import joined, stacked

DTYPES = (
    torch.float32,
    torch.int64,
    torch.uint8,
    torch.bfloat16,
    torch.float64,
    torch.int32,
    torch.bool,
    torch.float16,
)
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    st.lists(st.integers(0, 4), min_size=0, max_size=3),
    st.sampled_from(DTYPES),
)
UNITS = st.dictionaries(st.sampled_from("ab"), st.dictionaries(st.sampled_from("xyz"), TENSORS))
SAMPLES = st.builds(
    Sample,
    st.text(max_size=4),
    TENSORS,
    st.dictionaries(st.sampled_from("ab"), st.lists(TENSORS, max_size=3)),
    units=UNITS,
    unit_rows=st.dictionaries(st.sampled_from("ab"), st.integers(0, 9)),
    values=st.dictionaries(st.sampled_from("xy"), TENSORS),
    **{name: st.integers(0, 9) for name in COSTS},
)


@pytest.fixture(scope="module", autouse=True)
def short_ends():
    """torch waits 5 s for the end of a worker that hangs, and where a test leaves one to the garbage collector, in
    whichever test that collects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
        yield
        gc.collect()


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(SAMPLES | st.builds(Unreadable, st.text()), max_size=5))
def test_a_request_comes_out_of_its_buffer_as_it_went_in(payloads):
    for given_, found in zip(payloads, unpacked(*packed(payloads)), strict=True):
        if isinstance(given_, Unreadable):
            assert found == given_
            continue
        assert (found.id, found.media.keys()) == (given_.id, given_.media.keys())
        assert [getattr(found, name) for name in COSTS] == [getattr(given_, name) for name in COSTS]
        pairs = [(given_.tokens, found.tokens)]
        for kind, items in given_.media.items():
            pairs += zip(items, found.media[kind], strict=True)
        assert found.unit_rows == given_.unit_rows
        assert {kind: set(unit) for kind, unit in found.units.items()} == {k: set(u) for k, u in given_.units.items()}
        pairs += [(t, found.units[kind][key]) for kind, unit in given_.units.items() for key, t in unit.items()]
        assert found.values.keys() == given_.values.keys()
        pairs += [(value, found.values[name]) for name, value in given_.values.items()]
        assert all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def test_the_items_of_a_request_stack_without_a_copy_and_others_with_one():
    images = [torch.randn(3, 5, 7) for _ in range(5)]
    samples = [Sample("a", torch.arange(3), {"image": images[:2], "audio": [torch.randn(2, 3)]}), Unreadable("no")]
    samples += [Sample("b", torch.arange(2), {}), Sample("c", torch.arange(4), {"image": images[2:]})]
    found = unpacked(*packed(samples))
    laid = [*found[0].media["image"], *found[3].media["image"]]
    batch = stacked(laid)
    assert batch.data_ptr() == laid[0].data_ptr()
    assert batch.is_contiguous()
    for chosen in ([0, 1, 2, 3, 4], [4, 3], [0, 2], [1, 1], [3]):
        assert torch.equal(stacked([laid[i] for i in chosen]), torch.stack([images[i] for i in chosen]))
    assert stacked([torch.zeros(0, 2)] * 3).shape == (3, 0, 2)
    rows = laid[0].flatten()[:6].view(3, 2)
    adjacent, apart, overlapping = [rows[:1], rows[1:]], [rows[:1], rows[2:]], [rows[:2], rows[1:]]
    assert joined(adjacent).data_ptr() == rows.data_ptr()
    for parts in (adjacent, apart, overlapping, [rows[1:], rows[:1]]):
        assert torch.equal(joined(parts), torch.cat(parts))


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


class Fragile(DigitsSource):
    """Comes to grief at some samples: 13 cannot be read, 7 kills its process, 8 never ends, 9 has no room."""

    def load(self, index, kinds=None):
        if index == 13:
            raise SampleError("sample 'digits/train/13': it is broken")
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 9:
            os.pwrite = full
        while index == 8:
            time.sleep(60)
        return super().load(index, kinds)


def sources():
    return SplitSources({"train": Fragile, "validation": partial(DigitsSource, "validation")})


def wanted(*indices, split="train", kinds=("image",)):
    return [Wanted(split, i, kinds) for i in indices]


def same(a, b):
    return (
        a.id == b.id
        and torch.equal(a.tokens, b.tokens)
        and all(torch.equal(x, y) for x, y in zip(a.media.get("image", ()), b.media.get("image", ()), strict=True))
    )


@pytest.mark.slow
def test_workers_load_the_same_samples_whatever_was_announced_and_asked_for():
    state = torch.get_rng_state()
    more = [[wanted(20, 21)], [wanted(22), wanted(23, 24)]]
    with InWorkers(sources(), 2, 2, timeout=60) as workers, Payloads(sources()) as direct:
        workers.announce([wanted(1, 2, 3), wanted(4), wanted(5, 5)])
        workers.when_idle(lambda: workers.announce(more.pop(0)) if more else None)
        for request in (
            wanted(4),  # in another order than announced
            wanted(1, 2, 3),
            wanted(30, split="validation"),  # not announced
            wanted(5),
            wanted(5),
            wanted(6, 6, kinds=()),
            wanted(23, 22, 24),
            wanted(20, 21),
            wanted(31, kinds=None),
        ):
            found = workers.get(request)
            assert all(same(a, b) for a, b in zip(found, direct.get(request), strict=True))
        assert workers.get(wanted(13)) == [Unreadable("sample 'digits/train/13': it is broken")]
        assert not workers._known
        assert not workers._ready
    assert torch.equal(torch.get_rng_state(), state)  # what is random in training does not depend on workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "timeout", "message"),
    [
        (7, 60.0, "a process that loads samples has died while it was at sample 'digits/train/7'"),
        (8, 2.0, "loading sample 'digits/train/8' did not finish within 2 s"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_an_error_that_names_the_sample(index, timeout, message):
    with InWorkers(sources(), 2, 2, timeout=timeout) as workers:
        workers.announce([wanted(1), wanted(index), wanted(2)])
        with pytest.raises(LoaderError, match=message):  # a worker that dies may do so before the other is done
            workers.get([*wanted(1), *wanted(index)])


@pytest.mark.slow
def test_a_worker_that_dies_while_its_answer_is_taken_is_an_error_that_names_the_sample():
    """torch says so only if the process has ended by the time that its connection has."""

    def reset():
        raise ConnectionResetError(104, "Connection reset by peer")
        yield

    with InWorkers(sources(), 1, 2, timeout=30.0) as workers:
        taken, workers._results = workers._results, reset()
        workers._at = torch.tensor([[0, 7]])  # what the process itself says is no longer heard
        with pytest.raises(LoaderError, match="has died while it was at sample 'digits/train/7'"):
            workers.get(wanted(2))
        workers._results = taken


@pytest.mark.slow
def test_a_worker_that_dies_while_others_start_is_an_error(monkeypatch):
    """torch's own handler of SIGCHLD is at work then, and raises this wherever the process is."""
    gc.unfreeze()  # what the tests have frozen
    before = signal.getsignal(signal.SIGCHLD)

    def handler(self):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_put_index", handler)
    with pytest.raises(LoaderError, match=r"died while it was started: worker \(pid 7\) is killed by signal: Killed"):
        InWorkers(sources(), 2, 2, timeout=30.0)
    assert signal.getsignal(signal.SIGCHLD) is before
    assert gc.get_freeze_count() == 0
    gc.freeze()


@pytest.mark.slow
def test_a_request_for_which_there_is_no_shared_memory_is_an_error():
    says = r"no shared memory for the next 2 samples: .* No space left on device"
    with InWorkers(sources(), 1, 2, timeout=30.0) as workers, pytest.raises(LoaderError, match=says):
        workers.get(wanted(1, 9))
