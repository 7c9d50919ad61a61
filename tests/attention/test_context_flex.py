"""The CUDA kernel's forward equals the CPU kernel's, where flex_attention runs without compiling it: on a CPU.

Its backward is tested with a forward that autograd can go through on a CPU.
"""

import functools
import gc

import pytest
import torch

from hetmesh.attention import flex as context_flex
from hetmesh.attention.attention_plan import plan_attention
from hetmesh.attention.flex import flex_backward, flex_forward
from hetmesh.attention.kernels import ForwardState, Running, Terms, cpu_backward, cpu_forward
from hetmesh.context import assign, text_with_instances
from hetmesh.layout.intervals import extent

MASK = text_with_instances(520, [(30, 200), (260, 420)])


def pieces(window, width=16):
    """Folded queries and one buffer of keys per piece of work, of the second of three ranks."""
    plan = plan_attention(MASK, assign(MASK, 3), 1, window, 4096)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = draw(2, 2 * extent(plan.own.runs), width)
    works = [plan.own, *(chunk.work for chunk in plan.chunks)]
    sizes = [int((work.keys.stops - work.keys.starts).sum()) for work in works]
    return q, draw(*q.shape), [(work, draw(n, 2, 2, width)) for work, n in zip(works, sizes, strict=True)], plan.masks


def attention(kernel, q, works, terms):
    running = Running.zeros(q)
    for work, kv in works:
        kernel(running, q, kv, work, terms)
    return running


@pytest.mark.slow
@pytest.mark.parametrize(("window", "width"), [(None, 16), (50, 6)])  # Triton's products take 16 columns and more
def test_the_forward(window, width):
    q, _, works, masks = pieces(window, width)
    terms = Terms(masks, 0.2, 2)
    found, right = (
        attention(kernel, q.float(), [(w, kv.float()) for w, kv in works], terms)
        for kernel in (flex_forward, cpu_forward)
    )
    assert torch.allclose(found.out, right.out, atol=1e-5)
    assert torch.allclose(found.logsumexp, right.logsumexp, atol=1e-5)


@pytest.mark.slow
def test_one_compiled_kernel_serves_all_sizes(monkeypatch):
    # Past 8 graphs dynamo would give up; a limit that is met is an error here (fullgraph). Torch's kernel for short
    # queries, which compiles for CUDA alone, has no block size for 65 to 127 rows of heads that share keys.
    kinds, asked = {}, []

    def kernel_of(_device, *kind):
        compiled = kinds.setdefault(kind, context_flex.compiled_kernel("eager"))

        def call(q, *args, **options):
            asked.append((q.shape[2], options["kernel_options"]["BACKEND"]))
            return compiled(q, *args, **options)

        return call

    monkeypatch.setattr(context_flex, "_kernel", kernel_of)
    torch._dynamo.utils.counters.clear()
    for length, rank_count in [(520, 2), (60, 2), (70, 2), (300, 3), (900, 3), (33, 2)]:
        mask = text_with_instances(length, [(3, 20)])
        plan = plan_attention(mask, assign(mask, rank_count), 1, None, 4096)
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(2, 2 * extent(plan.own.runs), 16, generator=generator)
        works = [
            (w, torch.randn(int((w.keys.stops - w.keys.starts).sum()), 2, 2, 16, generator=generator))
            for w in [plan.own, *(chunk.work for chunk in plan.chunks)]
        ]
        terms = Terms(plan.masks, 0.2, 2)
        with torch.no_grad():
            found, right = (attention(kernel, q, works, terms) for kernel in (flex_forward, cpu_forward))
        assert torch.allclose(found.out, right.out, atol=1e-5)
    assert len(kinds) == 1
    assert {backend for _, backend in asked} == {"TRITON"}
    assert min(rows for rows, _ in asked) > 128
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.exhaustive  # compiling twice takes seconds
@pytest.mark.slow
def test_two_head_configurations_are_compiled_apart(monkeypatch):
    """Past 8 graphs of one function dynamo gives up: each configuration and gradient mode has a function of its own.
    Two graphs each: sizes that happen to be equal, as two blocks of two heads, make another one."""
    monkeypatch.setattr(context_flex, "compiled_kernel", lambda _, real=context_flex.compiled_kernel: real("eager"))
    kernel = functools.cache(context_flex._kernel.__wrapped__)
    monkeypatch.setattr(context_flex, "_kernel", lambda _device, *kind: kernel("cuda", *kind))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in (300, 520, 900):
        mask = text_with_instances(length, [(3, 20)])
        plan = plan_attention(mask, assign(mask, 2), 1, None, 4096)
        rows = extent(plan.own.runs)
        for heads, group, width in [(2, 2, 16), (1, 4, 32)]:
            q, kv = torch.randn(heads, group * rows, width), torch.randn(rows, 2, heads, width)
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    flex_forward(Running.zeros(q), q, kv, plan.own, Terms(plan.masks, 0.2, group))
    assert kernel.cache_info().currsize == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * 4


def test_block_masks_are_kept_for_as_long_as_their_plan():
    made = [plan_attention.__wrapped__(MASK, assign(MASK, 3), i, None, 64) for i in range(3)] * 2
    works = [work for plan in made for work in (plan.own, *(chunk.work for chunk in plan.chunks)) if work.calls]
    before = len(context_flex._block_masks)
    masks = [context_flex.block_mask(work, made[0].masks, 256, 256, torch.device("cpu")) for work in works * 8]
    each = len(works) // 2
    assert len(set(map(id, masks))) == each == len(context_flex._block_masks) - before
    del made, works, masks
    gc.collect()
    assert len(context_flex._block_masks) == before


def test_the_backward_through_the_online_softmax(monkeypatch):
    q, gradient, works, masks = pieces(None)
    terms = Terms(masks, 0.2, 2)
    running = attention(cpu_forward, q, works, terms)
    saved = ForwardState(q, running.out, running.logsumexp, gradient)

    def dense(q, kv, work, terms):
        rows, keys = q.shape[1] // terms.group, len(kv)
        seen = context_flex._visible(work, terms.masks, rows, keys, q.device)
        none = torch.zeros((), dtype=torch.int64)
        mask = seen(none, none, torch.arange(rows)[:, None], torch.arange(keys)).repeat_interleave(terms.group, 0)
        k, v = (x.transpose(0, 1) for x in kv.unbind(1))
        scores = (q @ k.transpose(1, 2) * terms.scale).masked_fill(~mask, -1e300)
        logsumexp = scores.logsumexp(-1)
        return (scores - logsumexp[..., None]).exp() @ v, logsumexp

    monkeypatch.setattr(context_flex, "_attend", dense)
    sums = []
    for backward in (flex_backward, cpu_backward):
        dq, parts = torch.zeros_like(q), [torch.zeros_like(kv) for _, kv in works]
        for (work, kv), part in zip(works, parts, strict=True):
            backward(saved, kv, work, terms, dq, part)
        sums.append([dq, *parts])
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*sums, strict=True))
