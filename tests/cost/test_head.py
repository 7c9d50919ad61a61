"""Bytes of a head by chunks of targets, against what is alive."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetmesh.cost import LayerOptions, LayerShape, WeightShape, Work, activation_bytes, layer_time
from hetmesh.cost import head as head_costs
from hetmesh.cost.activations import backward_bytes, forward_bytes, split_bytes
from hetmesh.cost.head import most_targets
from hetmesh.cost.layer_time import Rates
from hetmesh.parallel import CrossEntropy, linear_cross_entropy, logits_or_loss, vocabulary
from hetmesh.parallel.linear_cross_entropy import LOSS, asking_for_loss
from hetmesh.runtime.live_bytes import LiveBytes

VOCAB, FEATURES, CHUNK = 2048, 64, 1 << 18


def alive(targets, dtype):
    """Bytes that a forward leaves behind, and the most beyond that while it runs."""
    head = nn.Linear(FEATURES, VOCAB, bias=False, dtype=dtype)
    hidden = torch.randn(targets, FEATURES, dtype=dtype, requires_grad=True)
    batch = {"targets": torch.randint(VOCAB, (targets,))}
    with LiveBytes([head.weight, hidden, batch["targets"]]) as live, asking_for_loss(CrossEntropy(), None):
        before = live.live
        with live.span("forward"):
            loss = logits_or_loss(head, head, hidden, batch, plain=True)[LOSS]
        with live.span("backward"):
            loss.backward()
    forward, backward = live.spans
    return forward.after - before, forward.peak - forward.after, backward.peak - backward.before


@pytest.mark.parametrize("targets", [2, 1024], ids=["few targets", "several chunks"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_bytes_are_those_that_are_alive(name, targets, monkeypatch):
    for module in (head_costs, linear_cross_entropy):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(vocabulary, "CHUNK", CHUNK // 16)  # CHUNK / 4 bytes in fp32
    monkeypatch.setattr(head_costs, "_RAISED_BYTES", CHUNK // 4)
    weight = WeightShape("lm_head.weight", (VOCAB, FEATURES), 1)
    layer, how = LayerShape("lm_head", (weight,), on_targets=True, by_chunks=True), LayerOptions(name, upstream=True)
    kept, moment, back = alive(targets, getattr(torch, name))
    assert kept == pytest.approx(activation_bytes(layer, Work(0, 0, targets), how), rel=0.02)
    at_once = Work(0, 0, round(min(targets, most_targets(layer, how))))
    assert moment <= 1.05 * forward_bytes(layer, at_once, how)
    assert moment >= 0.7 * forward_bytes(layer, at_once, how)
    assert back <= 0.02 * kept + backward_bytes(layer, at_once, how)
    assert split_bytes(layer, at_once, how) == 0


def test_weights_are_read_once_for_each_chunk():
    """And a head's gradients are made in its forward."""
    weight = WeightShape("lm_head.weight", (248_320, FEATURES), 1)
    whole = LayerShape("lm_head", (weight,), on_targets=True)
    chunks = LayerShape("lm_head", (weight,), on_targets=True, by_chunks=True)
    rates = Rates(1e18, 1e9, itemsize=2)
    count = 10 * head_costs.CHUNK_BYTES // (2 * weight.shape[0])
    before, after = (layer_time(x, Work(0, 0, count), rates, upstream=True) for x in (whole, chunks))
    read = weight.numel * rates.itemsize / rates.bandwidth
    assert after.forward - before.forward - before.backward == pytest.approx(3 * 9 * read, rel=1e-3)
    assert after.backward == 0
    again = layer_time(chunks, Work(0, 0, count), rates, upstream=True, recompute=True)
    assert again == after  # a head is never computed again
