"""Recurrences and convolutions over samples in one row equal those of each sample by itself, token by token: forward
and backward, in one process and shared by ranks."""

import dataclasses
import random
import sys
import types
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pytest
import torch
from random_contexts import random_shares

from hetmesh.attention import delta_rule as kernels
from hetmesh.attention import recurrence
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.delta_rule import convolve, delta_rule
from hetmesh.boundary import World
from hetmesh.context import causal, join
from hetmesh.context.pieces import plan_pieces
from hetmesh.cost.recurrence import Recurrence

KERNEL, KEY_HEADS, HEADS, DK, DV = 4, 2, 4, 5, 3
FEATURES = 2 * KEY_HEADS * DK + HEADS * DV
LENGTHS = (1, 2, KERNEL - 1, 63, 64, 65, 130)


def convolved(x, weight):
    """By the definition: `[rows, features]` of one sample."""
    rows = torch.cat([x.new_zeros(KERNEL - 1, x.shape[1]), x])
    return torch.stack([(rows[t : t + KERNEL] * weight.T).sum(0) for t in range(len(x))])


def recurrent(q, k, v, g, beta, state=None):
    """By the definition, token by token: the outputs, and the last state `[heads, dk, dv]`."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k))
    state = q.new_zeros(HEADS, DK, v.shape[-1]) if state is None else state
    outs = []
    for t in range(len(q)):
        state = g[t].exp()[:, None, None] * state
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - seen))
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * DK**-0.5)
    return torch.stack(outs), state


def drawn(rows, seed=0, dtype=torch.float64):
    """x, g and beta of all rows, the convolution's weight, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, FEATURES), (rows, HEADS), (rows, HEADS), (FEATURES, KERNEL), (rows, HEADS, DV)
    x, g, beta, weight, gradient = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in shapes)
    return [t.to(dtype) for t in (x, -g.abs() / 4, beta.sigmoid(), weight, gradient)]


def heads_of(x):
    q, k, v = x.split([KEY_HEADS * DK, KEY_HEADS * DK, HEADS * DV], -1)
    return q.unflatten(1, (KEY_HEADS, DK)), k.unflatten(1, (KEY_HEADS, DK)), v.unflatten(1, (HEADS, DV))


def expected(lengths, seed=0):
    """Output and gradients of x, g, beta and the weight, sample by sample."""
    *inputs, gradient = drawn(sum(lengths), seed)
    x, g, beta, weight = (t.requires_grad_() for t in inputs)
    outs = []
    for x_, g_, beta_ in zip(*(t.split(list(lengths)) for t in (x, g, beta)), strict=True):
        outs.append(recurrent(*heads_of(convolved(x_, weight)), g_, beta_)[0])
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, (x, g, beta, weight), gradient)]


def shared(state, at, inputs, gradient):
    """The same through `state`, of the rows `at`."""
    x, g, beta = (t[at].requires_grad_() for t in inputs[:3])
    weight = inputs[3].clone().requires_grad_()
    mixed = recurrence.shared_convolution(x, weight, None, None, state)
    out = recurrence.shared_delta_rule(*heads_of(mixed), g, beta, state, True)
    return [out.detach(), *torch.autograd.grad(out, (x, g, beta, weight), gradient[at])]


def far(given, right):
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(given, right, strict=True))


def test_samples_in_one_row_equal_each_by_itself():
    *inputs, gradient = drawn(sum(LENGTHS))
    state = ContextAttention(join(map(causal, LENGTHS)))
    found = shared(state, torch.arange(sum(LENGTHS)), inputs, gradient)
    assert far(found, expected(LENGTHS)) < 1e-12


def test_single_precision_rounds_samples_in_one_row_as_it_rounds_each():
    """A reset by a large negative gate would pass in double precision, and lose this."""
    *inputs, gradient = drawn(sum(LENGTHS), dtype=torch.float32)
    x, g, beta, weight = inputs
    at, right = torch.arange(sum(LENGTHS)), expected(LENGTHS)
    together = shared(ContextAttention(join(map(causal, LENGTHS))), at, inputs, gradient)
    apart = [
        shared(ContextAttention(causal(n)), torch.arange(n), (*part[:3], weight), part[3])[0]
        for n, *part in zip(LENGTHS, *(t.split(LENGTHS) for t in (x, g, beta, gradient)), strict=True)
    ]
    assert far(together[:1], right[:1]) < 2 * far([torch.cat(apart)], right[:1]) < 1e-5


def test_what_a_piece_does_to_a_state_is_the_affine_map_that_the_rule_makes_of_zeros_and_ones():
    x, g, beta, _, _ = drawn(70)
    q, k, v = heads_of(x)
    state = torch.randn(1, HEADS, DK, DV, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    start = torch.eye(DK, DV + DK, dtype=torch.float64).roll(DV, 1).expand(1, HEADS, -1, -1)
    wider = torch.cat([v, v.new_zeros(70, HEADS, DK)], -1)
    into, onto = delta_rule(q, k, wider, g, beta, [0, 70], initial_state=start, normalize=True)[1][0].split(
        [DV, DK], -1
    )
    out, last = delta_rule(q, k, v, g, beta, [0, 70], initial_state=state, normalize=True)
    assert torch.allclose(last[0], onto @ state[0] + into, rtol=0, atol=1e-13)
    right, last_right = recurrent(q, k, v, g, beta, state[0])
    assert torch.allclose(out, right, rtol=0, atol=1e-13)
    assert torch.allclose(last[0], last_right, rtol=0, atol=1e-13)


def test_strong_decays_overflow_nowhere():
    x, _, beta, _, _ = drawn(130, dtype=torch.float32)
    g = torch.full((130, HEADS), -21.0, requires_grad=True)
    out, last = delta_rule(*heads_of(x), g, beta, [0, 130], normalize=True)
    (gradient,) = torch.autograd.grad(out.sum() + last.sum(), g)
    assert all(bool(t.isfinite().all()) for t in (out, last, gradient))


def test_pieces_and_halos_of_alternating_runs_by_hand():
    mask = join([causal(3), causal(9)])
    shares = (((0, 2), (6, 8)), ((2, 6), (8, 12)), ())
    first, second, none = (plan_pieces(mask, shares, rank) for rank in range(3))
    assert (first.bounds.tolist(), first.starts.tolist(), first.samples.tolist()) == ([0, 2, 4], [0, 6], [0, 3])
    assert (second.bounds.tolist(), second.starts.tolist()) == ([0, 1, 4, 8], [2, 3, 8])
    assert none.bounds.tolist() == [0, 1]
    cuts = first.cuts  # at 2, 6 and 8
    assert cuts.chained.tolist() == [False, False, True]
    assert cuts.before.intervals == (((0, 1), (2, 3)), ((1, 2),), ())
    assert cuts.behind.intervals == (((1, 2),), ((0, 1), (2, 3)), ())
    assert (cuts.leaving.tolist(), cuts.entering.tolist(), cuts.of_entering.tolist()) == ([0, 1], [1], [-1, 0])
    halo = recurrence.plan_halo(mask, shares, 1, 4)
    assert halo.taken.taken.intervals == (((3, 6),), ((0, 2), (5, 8)), ())
    # rows 0 to 7 are its own, 8 to 12 those of positions 0, 1, 5, 6, 7, and 13 is zeros
    assert halo.rows.tolist() == [13, 8, 9, 0, 13, 13, 13, 1, 2, 3, 10, 11, 12, 4, 5, 6, 7]
    assert halo.out.tolist() == [3, 7, 8, 9, 13, 14, 15, 16]


@dataclasses.dataclass(frozen=True)
class Case:
    """Samples, and who keeps what."""

    lengths: tuple
    shares: tuple
    seed: int = 0

    @classmethod
    def draw(cls, seed, ranks):
        rng = random.Random(seed)
        lengths = tuple(rng.choice([1, 2, 3, 17, 40]) for _ in range(rng.randint(1, 4)))
        return cls(lengths, random_shares(rng, sum(lengths), ranks), seed)


def rows_of(runs):
    return torch.tensor([row for a, b in runs for row in range(a, b)], dtype=torch.int64)


ALTERNATING = Case((3, 90, 2), (((0, 20), (50, 51)), ((20, 30), (51, 70)), ((30, 50), (71, 95)), ((70, 71),)))
"""Five cuts in one sample, runs of one token, and ranks whose order is not that of positions."""


def run(rank, cases, fault=None, dtype=torch.float64):
    """This rank's outputs and gradients per case, and the bytes received as states: forward and backward."""
    found, world = [], World.current()
    with ExitStack() as stack:
        for attribute, replacement in FAULTS[fault]() if fault else ():
            stack.enter_context(patch.object(recurrence, attribute, replacement))
        for case in cases:
            *inputs, gradient = drawn(sum(case.lengths), case.seed, dtype)
            at = rows_of(case.shares[rank])
            if not len(at):  # one row that counts for nothing
                gradient, at = torch.zeros_like(gradient), torch.zeros(1, dtype=torch.int64)
            world.log.clear()
            state = ContextAttention(join(map(causal, case.lengths)), case.shares, range(4), name="llm attention")
            result = shared(state, at, inputs, gradient)
            sizes = [
                world.log.bytes_received(name, way)
                for name in ("llm cp states", "llm cp halo")
                for way in ("forward", "backward")
            ]
            found.append((result, sizes))
    return found


def errors(case, ranks):
    """Per case the largest error of what all ranks have together."""
    right = expected(case.lengths, case.seed)
    joined = [torch.zeros_like(t) for t in right]
    for runs, (result, _) in zip(case.shares, ranks, strict=True):
        at = rows_of(runs)
        for whole, part in zip(joined[:4], result[:4], strict=True):
            whole[at] = part[: len(at)].double()
        joined[4] += result[4]
    return far(joined, right)


@pytest.mark.slow
def test_drawn_shares_of_a_row_equal_samples_by_themselves(pool4):
    cases = [ALTERNATING, *(Case.draw(seed, 4) for seed in range(12))]
    results = pool4.run(run, cases, timeout=120)
    for i, case in enumerate(cases):
        assert errors(case, [found[i] for found in results]) < 1e-10, case


@pytest.mark.slow
def test_single_precision_rounds_the_pieces_of_a_sample_as_it_rounds_the_whole(pool4):
    results = pool4.run(run, [ALTERNATING], None, torch.float32, timeout=120)
    *inputs, gradient = drawn(95, dtype=torch.float32)
    plain = shared(ContextAttention(join(map(causal, ALTERNATING.lengths))), torch.arange(95), inputs, gradient)
    assert errors(ALTERNATING, [found[0] for found in results]) < 2 * far(plain, expected(ALTERNATING.lengths)) < 1e-5


@pytest.mark.slow
def test_bytes_at_cuts_depend_on_their_number_alone_and_are_those_that_costs_count(pool4):
    short, long = (Case((4 * n,), tuple(((r * n, (r + 1) * n),) for r in range(4))) for n in (8, 100))
    cases = [short, long, ALTERNATING]
    results = pool4.run(run, cases, timeout=120)
    own = Recurrence(HEADS, KEY_HEADS, DK, DV, True, convolved=FEATURES, kernel=KERNEL).cut_bytes(8)
    for i, cuts in enumerate((3, 3, 6)):
        forward, backward, *halo = np.sum([found[i][1] for found in results], 0)
        # of the heads of each cut a quarter stays on the rank
        assert forward == cuts * (own.forward - own.halo) * 3 // 4
        assert backward == cuts * (own.backward - own.halo) * 3 // 4
        # and rows are sent once to a rank that reads them for two of its pieces
        assert halo[0] <= cuts * own.halo
        assert halo[0] == cuts * own.halo or cases[i] is ALTERNATING


def one_sample():
    own = recurrence.plan_pieces, recurrence.plan_halo
    whole = [lambda mask, *args, make=make: make(causal(mask.length), *args) for make in own]
    return zip(("plan_pieces", "plan_halo"), whole, strict=True)


def without_halo():
    own = recurrence.fetch
    return [("fetch", lambda *args: lambda: torch.zeros_like(own(*args)()))]


def transposed():
    own = recurrence.exchange

    def exchange(wires, plan, local, label):
        if local.shape[-1] == DK + DV:
            local = torch.cat([local[..., :DV], local[..., DV:].mT], -1)
        return own(wires, plan, local, label)

    return [("exchange", exchange)]


def by_ranks():
    own = recurrence.plan_pieces

    def plan(*args):
        pieces = own(*args)
        # maps come in the order of the ranks that made them
        owners = [rank for rank, runs in enumerate(pieces.cuts.before.intervals) for a, b in runs for _ in range(a, b)]
        spans = [tuple((i, i + 1) for i, owner in enumerate(sorted(owners)) if owner == rank) for rank in range(4)]
        return dataclasses.replace(
            pieces, cuts=dataclasses.replace(pieces.cuts, before=type(pieces.cuts.before)(0, tuple(spans)))
        )

    return [("plan_pieces", plan)]


FAULTS = {"one sample": one_sample, "no halo": without_halo, "transposed": transposed, "by ranks": by_ranks}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(pool4, fault):
    """A state and inputs that pass from sample to sample, no rows in front of pieces, a map that is transposed, ranks
    in place of positions."""
    results = pool4.run(run, [ALTERNATING], fault, timeout=120)
    assert errors(ALTERNATING, [found[0] for found in results]) > 1e-3


def test_kernels_of_installed_packages_are_called_by_their_public_arguments(monkeypatch):
    """Modules with the signatures of fla and causal_conv1d stand for them, on a CPU in place of a GPU."""
    called = []

    def chunk_gated_delta_rule(
        q,
        k,
        v,
        g=None,
        beta=None,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
    ):
        called.append("fla")
        assert output_final_state
        assert q.shape[0] == 1
        assert cu_seqlens.dtype is torch.int64
        with patch.object(kernels, "KERNEL_DEVICES", set()):
            out, state = delta_rule(
                *(x[0] for x in (q, k, v, g, beta)),
                cu_seqlens.numpy(),
                initial_state=initial_state,
                normalize=use_qk_l2norm_in_kernel,
            )
        return out[None], state

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
        called.append("causal_conv1d")
        assert x.is_contiguous()
        with patch.object(kernels, "KERNEL_DEVICES", set()):
            return convolve(x[0].T, weight, bias, activation).T[None]

    fakes = {"fla": {}, "fla.ops": {}, "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule}}
    for name, functions in {**fakes, "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn}}.items():
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    kernels._function.cache_clear()
    *inputs, gradient = drawn(sum(LENGTHS), dtype=torch.float32)
    state, at = ContextAttention(join(map(causal, LENGTHS))), torch.arange(sum(LENGTHS))
    plain = shared(state, at, inputs, gradient)
    assert not called
    monkeypatch.setattr(kernels, "KERNEL_DEVICES", {"cpu"})
    assert far(shared(state, at, inputs, gradient), plain) < 1e-6
    assert called == ["causal_conv1d", "fla"]
    kernels._function.cache_clear()
