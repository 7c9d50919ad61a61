"""Context-parallel attention equals attention of one process over the dense mask, forward and backward."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from random_contexts import random_mask, random_shares

from hetmesh.attention.context_attention import ContextAttention
from hetmesh.boundary import World
from hetmesh.context import POLICIES, Mask, assign, causal, visible
from hetmesh.errors import BoundaryError, LayoutError
from support.dense_oracle import dense
from support.mask_families import families


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention: everything that all processes agree on."""

    mask: Mask
    shares: tuple
    heads: tuple
    window: int | None
    chunk: int
    seed: int


def random_case(seed, ranks):
    rng = random.Random(seed)
    if rng.random() < 0.4:
        mask = rng.choice(list(families(rng.choice([256, 700]), seed).values()))
    else:
        mask = random_mask(rng, rng.choice([1, 40, 300, 700]))
    shares = random_shares(rng, mask.length, ranks)
    if rng.random() < 0.5:
        shares = assign(mask, ranks, policy=rng.choice(sorted(POLICIES)), block=rng.choice([16, 128]))
    return Case(
        mask,
        shares,
        rng.choice([(1, 1), (2, 2), (4, 2), (3, 1)]),
        rng.choice([None, None, 1, 37, 200]),
        rng.choice([1 if mask.length < 50 else 50, 100, 128, 4096]),
        seed,
    )


def draw(case):
    generator = torch.Generator().manual_seed(case.seed)
    heads, kv_heads = case.heads
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(n, case.mask.length, 8, dtype=torch.float64, generator=generator) for n in sizes]


def expected(case):
    """Out, dq, dk, dv of the whole sequence, from the dense mask."""
    q, k, v, gradient = draw(case)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    seen = dense(case.mask) if case.mask.length < 100 else visible(case.mask, *[np.arange(case.mask.length)] * 2)
    at = np.arange(case.mask.length)
    if case.window is not None:
        seen = seen & (abs(at[:, None] - at[None, :]) < case.window)
    seen = torch.from_numpy(seen)
    group = case.heads[0] // case.heads[1]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * 0.3
    weights = torch.where(seen, scores, -1e300).softmax(-1) * seen
    out = weights @ v.repeat_interleave(group, 0)
    out.backward(gradient)
    return [out.detach(), q.grad, k.grad, v.grad]


def rows_of(runs):
    return torch.tensor([row for a, b in runs for row in range(a, b)], dtype=torch.int64)


def attend(rank, case, ranks):
    """This rank's out, dq, dk, dv, and the bytes that it received: keys forward, keys backward, gradients."""
    if rank not in ranks:
        return None
    world = World.current()
    world.log.clear()
    shares = case.shares if len(ranks) > 1 else None
    state = ContextAttention(case.mask, shares, ranks, name="cp", microbatch=3, chunk=case.chunk)
    at = rows_of(case.shares[ranks.index(rank)])
    *inputs, gradient = (x[:, at] for x in draw(case))
    inputs = [x.requires_grad_() for x in inputs]
    out = state(*inputs, scale=0.3, window=case.window)
    out.backward(gradient)
    log = world.log
    assert all(message.label.microbatch == 3 for message in log.messages)
    sizes = [log.bytes_received("cp", way) for way in ("forward", "backward")]
    return [out.detach(), *(x.grad for x in inputs)], [*sizes, log.bytes_received("cp gradients")]


def needed_rows(case):
    """Per rank the rows of others in blocks of 128 with a key that it sees: by brute force."""
    length, at = case.mask.length, np.arange(case.mask.length)
    seen = visible(case.mask, at, at)
    if case.window is not None:
        seen &= abs(at[:, None] - at[None, :]) < case.window
    counts = []
    for runs in case.shares:
        own = rows_of(runs).numpy()
        some = seen[own].any(0)
        wanted = np.array([some[j // 128 * 128 : j // 128 * 128 + 128].any() for j in range(length)], bool)
        wanted[own] = False
        counts.append(wanted)
    return counts


def check(case, results):
    whole = expected(case)
    row_bytes = 2 * case.heads[1] * 8 * 8
    for runs, (found, _) in zip(case.shares, results, strict=True):
        for name, mine, right in zip(("out", "dq", "dk", "dv"), found, whole, strict=True):
            error = (mine - right[:, rows_of(runs)]).norm() / max(right.norm(), 1e-3)  # one key: dq is 0
            assert error < 1e-10, f"{name} of {case}"
    wanted = needed_rows(case)
    takers = np.sum(wanted, 0)
    for runs, mine, (_, sizes) in zip(case.shares, wanted, results, strict=True):
        given = int(takers[rows_of(runs).numpy()].sum())
        assert sizes in (None, [mine.sum() * row_bytes, mine.sum() * row_bytes, given * row_bytes]), case


@pytest.mark.slow
def test_one_process_applies_the_mask():
    for seed in range(16):
        case = dataclasses.replace(random_case(seed, 1), shares=())
        case = dataclasses.replace(case, shares=(((0, case.mask.length),),))
        q, k, v, gradient = draw(case)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = ContextAttention(case.mask)(*inputs, scale=0.3, window=case.window)
        out.backward(gradient)
        check(case, [([out.detach(), *(x.grad for x in inputs)], None)])


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_other_dtypes(dtype, error):
    case = dataclasses.replace(random_case(4, 1), mask=families(700)["image_bits"], heads=(4, 2), window=None)
    *inputs, gradient = (x.to(dtype) for x in draw(case))
    inputs = [x.requires_grad_() for x in inputs]
    out = ContextAttention(case.mask)(*inputs, scale=0.3)
    out.backward(gradient)
    for mine, right in zip((out.detach(), *(x.grad for x in inputs)), expected(case), strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - right).norm() < error * right.norm()


def test_what_does_not_fit_is_refused():
    q = torch.zeros(3, 10, 4)
    with pytest.raises(BoundaryError, match=r"heads a multiple.*\(3, 10, 4\) torch.float32, \(2, 10, 4\)"):
        ContextAttention(causal(10))(q, q[:2], q[:2])
    with pytest.raises(BoundaryError, match="of one dtype"):
        ContextAttention(causal(10))(q, q, q.double())
    with pytest.raises(BoundaryError, match="q \\[heads, 11, features\\]"):
        ContextAttention(causal(11))(q, q, q)
    with pytest.raises(LayoutError, match="together the 10 positions"):
        ContextAttention(causal(10), (((0, 4),), ((5, 10),)), (0, 1))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes(pool):
    cases = [random_case(seed, 2) for seed in range(16)]
    for case, results in zip(cases, pool(2).run_many(attend, [(c, (0, 1)) for c in cases]), strict=True):
        check(case, results)


@pytest.mark.slow
def test_four_processes(pool4):
    cases = [random_case(1000 + seed, 4) for seed in range(12)]
    for case, results in zip(cases, pool4.run_many(attend, [(c, (0, 1, 2, 3)) for c in cases]), strict=True):
        check(case, results)


@pytest.mark.slow
def test_a_group_of_some_ranks_in_any_order(pool4):
    cases = [random_case(2000 + seed, 3) for seed in range(8)]
    for case, results in zip(cases, pool4.run_many(attend, [(c, (3, 0, 2)) for c in cases]), strict=True):
        check(case, [results[rank] for rank in (3, 0, 2)])


@pytest.mark.slow
def test_eight_processes(pool8):
    cases = [random_case(3000 + seed, 8) for seed in range(4)]
    for case, results in zip(cases, pool8.run_many(attend, [(c, tuple(range(8))) for c in cases]), strict=True):
        check(case, results)
