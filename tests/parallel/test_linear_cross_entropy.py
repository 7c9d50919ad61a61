"""Head and cross-entropy by chunks of targets, against those of whole logits."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hetmesh.parallel import linear_cross_entropy
from hetmesh.parallel.linear import ColwiseLinear, Entry
from hetmesh.parallel.linear_cross_entropy import (
    CrossEntropy,
    _Linear,
    asking_for_loss,
    logits_or_loss,
    sum_cross_entropy,
)
from hetmesh.parallel.vocabulary import VocabularyShards
from hetmesh.runtime.backward import SplitBackward

FEATURES, VOCAB, RANKS = 6, 13, 4
ROW = 8 * VOCAB  # bytes of the logits of a target in fp64


class LowRank(nn.Module):
    """A head with an adapter beside it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.base = nn.Linear(FEATURES, VOCAB).requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.adapter = nn.Sequential(nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, VOCAB, bias=False))

    def forward(self, x):
        return self.base(x) + self.adapter(self.dropout(x))


HEADS = {
    "linear": (lambda: nn.Linear(FEATURES, VOCAB, bias=False), None),
    "with a bias": (lambda: nn.Linear(FEATURES, VOCAB), None),
    "frozen": (lambda: nn.Linear(FEATURES, VOCAB).requires_grad_(False), None),
    "soft-capped": (lambda: nn.Linear(FEATURES, VOCAB), lambda x: 2 * torch.tanh(x / 2)),
    "with an adapter": (LowRank, lambda x: x),
    "frozen, soft-capped": (lambda: nn.Linear(FEATURES, VOCAB).requires_grad_(False), lambda x: torch.tanh(x)),
}


def made(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, {"targets": torch.randint(VOCAB, (count,), generator=generator)}


def head_of(name, dtype=torch.float64):
    torch.manual_seed(1)
    make, after = HEADS[name]
    return make().to(dtype), after


def loss_of(head, after, hidden, batch, observe=None, vocabulary=None):
    def logits(rows):
        return head(rows) if after is None else after(head(rows))

    with asking_for_loss(CrossEntropy(vocabulary), observe):
        (value,) = logits_or_loss(head, logits, hidden, batch, plain=after is None).values()
    return value


def gradients(head, hidden):
    return [hidden.grad, *(p.grad for p in head.parameters())]


@pytest.fixture(params=[1, 3 * ROW, 8 * ROW, 1 << 28], ids="{} bytes".format)
def chunks(request, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("count", [0, 1, 8, 9])
@pytest.mark.parametrize("name", HEADS)
def test_chunks_give_what_whole_logits_give(name, count):
    (head, after), (hidden, batch) = head_of(name), made(count)
    whole, rows = deepcopy(head), hidden.detach().clone().requires_grad_()
    logits = whole(rows) if after is None else after(whole(rows))
    expected = sum_cross_entropy(logits, batch)
    for _ in range(2):  # gradients of microbatches add up
        loss = loss_of(head, after, hidden, batch)
        (0.5 * loss).backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for own, other in zip(gradients(head, hidden), gradients(whole, rows), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "with an adapter"])
def test_a_split_backward_has_the_gradients_of_a_whole_one(name, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 3 * ROW)
    (head, after), (leaf, batch) = head_of(name), made(7)
    whole, rows = deepcopy(head), leaf.detach().clone().requires_grad_()
    loss_of(whole, after, 2 * rows, batch).backward()
    loss = loss_of(head, after, 2 * leaf, batch)
    split = SplitBackward(list(head.parameters()))
    split.input_part([loss], [torch.ones_like(loss)], [leaf])
    torch.testing.assert_close(leaf.grad, rows.grad)
    assert all(p.grad is None for p in head.parameters())
    split.weight_part()
    for own, other in zip(gradients(head, leaf), gradients(whole, rows), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["linear", "soft-capped"])
def test_of_bf16_the_loss_is_in_fp32(name, autocast, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", ROW)
    dtype = torch.float32 if autocast else torch.bfloat16
    (head, after), (hidden, batch) = head_of(name, dtype), made(9, dtype)
    exact, rows = deepcopy(head).double(), hidden.detach().double().requires_grad_()
    expected = sum_cross_entropy(exact(rows) if after is None else after(exact(rows)), batch)
    expected.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(head, after, hidden, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=1e-2)
    for own, other in zip(gradients(head, hidden), gradients(exact, rows), strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own.double(), other, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["linear", "with an adapter"])
def test_logits_are_shown_chunk_by_chunk(name, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 4 * ROW)
    (head, after), (hidden, batch) = head_of(name), made(9)
    seen = []
    with torch.no_grad():
        loss = loss_of(
            head,
            after,
            hidden,
            batch,
            lambda logits, of: seen.append((logits.clone(), of["targets"], of["target_index"])),
        )
        logits = head(hidden)
    assert len(seen) > 1
    assert not loss.requires_grad
    shown = [torch.cat(parts) for parts in zip(*seen, strict=True)]
    for given, expected in zip(shown, (logits, batch["targets"], torch.arange(9)), strict=True):
        torch.testing.assert_close(given, expected)


def test_a_second_backward_is_refused():
    (head, after), (hidden, batch) = head_of("linear"), made(3)
    loss = loss_of(head, after, hidden, batch)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


def test_logits_stay_whole_where_nobody_asks_for_the_loss():
    (head, _), (hidden, batch) = head_of("linear"), made(3)
    assert set(logits_or_loss(head, head, hidden, batch, plain=True)) == {""}
    with asking_for_loss(sum_cross_entropy, None):  # any other loss, as a user's own
        assert set(logits_or_loss(head, head, hidden, batch, plain=True)) == {""}


def test_each_chunk_of_a_head_with_dropout_draws_numbers_of_its_own(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 4 * ROW)
    head, (hidden, batch) = LowRank(0.5).double(), made(1)
    shown = []
    same, batch = hidden.detach().expand(6, -1), {"targets": batch["targets"].expand(6)}
    loss_of(head, lambda x: x, same, batch, lambda logits, _: shown.append(logits.clone()))
    assert len(shown) == 3
    assert not torch.equal(shown[0], shown[1])


def test_of_a_linear_head_one_buffer_is_all_that_is_held(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 3 * ROW)
    (head, _), (hidden, batch) = head_of("linear"), made(9)
    rows = _Linear(hidden, head)
    sizes = []
    CrossEntropy().by_chunks(rows, batch, lambda logits, _: sizes.append((logits.data_ptr(), len(logits))))
    assert len({place for place, _ in sizes}) == 1
    assert [size for _, size in sizes] == [3, 3, 3]


def on_a_rank(rank, chunk, vocab, count, capped):
    """Loss and gradients of a rank's share of a head."""
    widths = [len(part) for part in torch.arange(vocab).chunk(RANKS)]
    shards = VocabularyShards(dist.group.WORLD, (*widths, *[0] * (RANKS - len(widths))))
    weight, hidden, targets = of_vocabulary(vocab, count)
    head = nn.Linear(FEATURES, vocab, bias=False, dtype=torch.float64)
    head.__class__ = ColwiseLinear
    head.group, head.enter, head.widths = dist.group.WORLD, Entry(dist.group.WORLD), None
    head.weight = nn.Parameter(weight[shards.start : shards.start + shards.widths[rank]].clone())
    after = (lambda x: 2 * torch.tanh(x / 2)) if capped else None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(linear_cross_entropy, "CHUNK_BYTES", chunk)
        loss = loss_of(head, after, hidden.requires_grad_(), {"targets": targets}, vocabulary=shards)
        (0.5 * loss).backward()
    return loss.detach(), hidden.grad, head.weight.grad


def of_vocabulary(vocab, count):
    generator = torch.Generator().manual_seed(vocab + count)
    weight, hidden = (torch.randn(n, FEATURES, generator=generator, dtype=torch.float64) for n in (vocab, count))
    return weight, hidden, torch.randint(vocab, (count,), generator=generator)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(("vocab", "count"), [(30, 9), (3, 5), (30, 0)])
def test_shares_of_the_vocabulary_give_what_whole_logits_give(pool4, vocab, count, capped):
    weight, hidden, targets = of_vocabulary(vocab, count)
    logits = hidden.requires_grad_() @ weight.requires_grad_().T
    loss = sum_cross_entropy(2 * torch.tanh(logits / 2) if capped else logits, {"targets": targets})
    (0.5 * loss).backward()
    results = pool4.run(on_a_rank, 3 * 8 * 8, vocab, count, capped)
    for own, of_hidden, _ in results:
        torch.testing.assert_close(own, loss.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_hidden, hidden.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([part for *_, part in results]), weight.grad, rtol=1e-12, atol=1e-12)
