"""Bytes of tensors that are alive: each storage once, from its making to its end, whatever holds it."""

import pytest
import torch
from torch import nn

from hetmesh.runtime import LiveBytes

KB = 256 * 4


def test_a_storage_counts_once_until_nobody_holds_it():
    given = torch.zeros(256)
    with LiveBytes([given]) as live:
        assert live.live == KB
        x = torch.zeros(2, 256)
        view = x[0]
        assert live.live == 3 * KB
        del x
        assert live.live == 3 * KB, "a view holds all of it"
        del view
        assert (live.live, live.peak) == (KB, 3 * KB)
        with live.span("nothing"):
            pass
        assert (live.peak, live.spans[0].peak) == (3 * KB, KB), "a span has a peak of its own, and forgets no other"
        live.restart()
        assert (live.peak, live.spans) == (KB, [])
    torch.zeros(256)
    assert live.live == KB


def test_activations_and_gradients_of_a_step():
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 256, bias=False))
    weights = 2 * 256 * KB
    with LiveBytes([*model.parameters()]) as live:
        assert live.live == weights
        with live.span("forward"):
            loss = model(torch.zeros(8, 256)).sum()
        with live.span("backward"):
            loss.backward()
        del loss
        assert live.live == 2 * weights
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.step()
        assert live.live == pytest.approx(4 * weights, rel=1e-4)
        optimizer.zero_grad()
        assert live.live == pytest.approx(3 * weights, rel=1e-4)
    forward, backward = live.spans
    assert (forward.before, forward.label) == (weights, "forward")
    assert forward.after - forward.before >= 16 * KB, "input of both products, of which the second is tanh's output"
    assert backward.before == forward.after
    assert backward.peak >= 2 * weights
    assert live.peak >= backward.peak


def test_what_is_resized_counts_with_its_size_and_what_is_mapped_does_not():
    with LiveBytes() as live:
        storage = torch.zeros(256).untyped_storage()
        storage.resize_(0)
        assert live.live == 0
        storage.resize_(2 * KB)
        assert live.live == 2 * KB
        mapped = torch.frombuffer(bytearray(KB), dtype=torch.uint8)
        view, total = mapped[1:], mapped + 0
        assert live.live == 3 * KB, "the sum alone"
        del view, total
    assert torch.UntypedStorage.resize_ is live._resize
