"""Cross-entropy and arg-max from shares of the vocabulary, against those of whole logits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from hetmesh.parallel import CrossEntropy, vocabulary
from hetmesh.parallel.linear import ColwiseLinear
from hetmesh.parallel.vocabulary import VocabularyShards, shard_vocabulary

RANKS = 4
CASES = {  # vocabulary, targets
    "even": (32, 9),
    "uneven": (30, 7),
    "less than ranks": (3, 5),
    "no targets": (30, 0),
    "one target": (13, 1),
}


def widths(vocab: int) -> tuple[int, ...]:
    """As torch.chunk cuts."""
    each = [len(part) for part in torch.arange(vocab).chunk(RANKS)]
    return (*each, *[0] * (RANKS - len(each)))


def made(vocab: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab + count)
    logits = 30 * torch.randn(count, vocab, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(vocab, (count,), generator=generator)


def on_a_rank(rank: int, dtype: torch.dtype, chunk: int):
    """Per case: loss, gradient of the share, arg-max, and the same where some tokens are silent."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vocabulary, "CHUNK", chunk)
        return {name: of_shares(rank, *case, dtype) for name, case in CASES.items()}


def of_shares(rank: int, vocab: int, count: int, dtype: torch.dtype):
    whole, targets = made(vocab, count, dtype)
    shards = VocabularyShards(dist.group.WORLD, widths(vocab))
    own = whole[:, shards.start : shards.start + shards.widths[rank]].clone().requires_grad_()
    loss = CrossEntropy(shards)(own, {"targets": targets})
    (loss * 0.5).backward()
    return loss.detach(), own.grad, (shards.argmax(own), shards.argmax(own, set(whole.argmax(-1).tolist()[:1])))


def check(results, dtype, tolerance):
    for name, (vocab, count) in CASES.items():
        whole, targets = made(vocab, count, dtype)
        exact = whole.double().requires_grad_()
        loss = cross_entropy(exact, targets, reduction="sum")
        (loss * 0.5).backward()
        silent = whole.clone()
        silent[:, whole.argmax(-1)[:1]] = -torch.inf
        each = [result[name] for result in results]
        for own, _, (guessed, told) in each:
            assert own.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
            torch.testing.assert_close(own.double(), loss.detach(), rtol=tolerance, atol=tolerance)
            assert torch.equal(guessed, whole.argmax(-1))
            assert torch.equal(told, silent.argmax(-1))
        gradient = torch.cat([part for _, part, _ in each], -1)
        assert gradient.dtype == dtype
        assert gradient.shape == (count, vocab)
        limit = max(tolerance, 4e-3 if dtype == torch.bfloat16 else 0)
        torch.testing.assert_close(gradient.double(), exact.grad, rtol=limit, atol=limit)


@pytest.mark.parametrize("chunk", [1, 1 << 24])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)]
)
def test_shares_give_what_whole_logits_give(pool4, dtype, tolerance, chunk):
    check(pool4.run(on_a_rank, dtype, chunk), dtype, tolerance)


def of_equal_tokens(rank: int):
    shards = VocabularyShards(dist.group.WORLD, widths(8))
    logits = torch.tensor([[0.0, 2, 1, 2, 2, 0, 2, 2], [-1, -1, -1, -1, -1, -1, -1, -1]])
    return shards.argmax(logits[:, shards.start : shards.start + shards.widths[rank]])


def test_of_equal_tokens_the_first_is_taken(pool4):
    assert [guessed.tolist() for guessed in pool4.run(of_equal_tokens)] == [[1, 0]] * RANKS


def with_faults(rank: int, value: float):
    shards = VocabularyShards(dist.group.WORLD, widths(8))
    own = torch.zeros(2, shards.widths[rank])
    if rank == 2:
        own[1, 0] = value
    return float(CrossEntropy(shards)(own, {"targets": torch.tensor([0, 7])}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_on_one_rank_is_seen_by_all(pool4, value):
    assert all(loss != loss for loss in pool4.run(with_faults, value))


def outside(rank: int, token: int):
    shards = VocabularyShards(dist.group.WORLD, widths(8))
    own = torch.zeros(2, shards.widths[rank])
    return float(CrossEntropy(shards)(own, {"targets": torch.tensor([0, token])}))


@pytest.mark.parametrize("token", [-100, 8])
def test_a_target_outside_the_vocabulary_is_seen_by_all(pool4, token):
    assert all(math.isnan(loss) for loss in pool4.run(outside, token))


def split(features: int) -> nn.Linear:
    """As tensor parallelism leaves a layer of 6 outputs on two ranks."""
    layer = nn.Linear(features, 6)
    layer.__class__ = ColwiseLinear
    layer.group, layer.widths = None, (3, 3)
    return layer


@pytest.mark.parametrize(
    ("beside", "shares"),
    {
        "alone": ([], True),
        "an adapter that is split alike": ([nn.Linear(4, 2), split(2)], True),
        "an adapter that is whole": ([nn.Linear(4, 2), nn.Linear(2, 6)], False),
    }.values(),
    ids=lambda value: str(value) if isinstance(value, bool) else "",
)
def test_a_head_leaves_shares_where_all_that_it_adds_up_is_split(beside, shares):
    head = split(4)
    found = shard_vocabulary(nn.ModuleDict({"head": nn.Sequential(head, *beside)}), "head")
    assert (found is not None) == shares
    assert head.widths == (None if shares else (3, 3))
