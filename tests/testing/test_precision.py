"""exact_dtypes makes an fp64 run sharp: a change of 1e-12 in an input reaches the loss, and does not without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hetmesh.graph.topology import BoundarySpec
from hetmesh.models import build_module, make_adapters
from hetmesh.testing.precision import exact_dtypes, kept_casts

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def make() -> tuple[Any, dict[str, nn.Module]]:
    modules = {
        "vision": SimpleNamespace(model="siglip", config={**SIZES, "patch_size": 4}),
        "projector": SimpleNamespace(model="mlp", config={}),
        "llm": SimpleNamespace(model="qwen3", config=SIZES),
    }
    del modules["vision"].config["num_key_value_heads"]
    boundaries = [BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm", "image")]
    adapters = make_adapters(modules, boundaries, {"vision": "image"}, 23, {"image": (1, 8, 8)})
    return adapters, {name: build_module(a, name, 0, torch.float64) for name, a in adapters.items()}


def loss(adapters, modules, media: torch.Tensor) -> torch.Tensor:
    batch = {
        "input_ids": torch.tensor([[3, 1, 1, 1, 1, 5, 6, 7]]),
        "position_ids": torch.arange(8)[None],
        "target_positions": torch.tensor([4, 5, 6]),
        "positions.image": torch.arange(1, 5),
    }
    rows = adapters["vision"].forward(modules["vision"], {"media": media}, {})
    rows = adapters["projector"].forward(modules["projector"], {}, {"vision": rows})
    logits = adapters["llm"].forward(modules["llm"], batch, {"projector": rows})
    return cross_entropy(logits, torch.tensor([5, 6, 7]), reduction="sum")


def test_a_tiny_change_reaches_the_loss():
    """The change of the loss is that which the gradient predicts, to 3 digits; with the casts it is rounded away."""
    adapters, modules = make()
    media = torch.rand(1, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def relative_error() -> float:
        before = loss(adapters, modules, media)
        (gradient,) = torch.autograd.grad(before, media)
        step = 1e-12 * gradient / gradient.norm() ** 2 * before.detach()
        change = loss(adapters, modules, media + step) - before
        return float((change / (1e-12 * before) - 1).detach().abs())

    blunt = relative_error()
    with exact_dtypes(*modules.values()):
        sharp = relative_error()
    assert sharp < 1e-2
    assert blunt > 0.5


def test_it_is_the_same_function_and_leaves_no_trace():
    adapters, modules = make()
    media = torch.rand(1, 1, 8, 8)
    plain = loss(adapters, modules, media)
    with exact_dtypes(*modules.values()):
        exact = loss(adapters, modules, media)
    assert 0 < (plain - exact).abs() < 1e-5
    assert torch.equal(plain, loss(adapters, modules, media))
    assert all("forward" not in m.__dict__ for root in modules.values() for m in root.modules())


def test_a_norm_of_unknown_build_is_an_error():
    class OtherRMSNorm(nn.Module):
        pass

    with pytest.raises(ValueError, match="'0' is a OtherRMSNorm"), exact_dtypes(nn.Sequential(OtherRMSNorm())):
        pass


@pytest.mark.parametrize(
    "softmax",
    [
        lambda x: x.softmax(dim=-1, dtype=torch.float32),  # Unlimited-OCR's router
        lambda x: torch.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: nn.functional.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.float().softmax(-1),
        lambda x: x.to(torch.float32).softmax(-1),
        lambda x: x.type(torch.float32).softmax(-1),
    ],
)
def test_every_cast_stays_in_fp64(softmax):
    x = torch.rand(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert softmax(x).dtype == torch.float32
    with exact_dtypes(nn.Linear(2, 2).double(), every_cast=True):
        assert torch.equal(softmax(x), x.softmax(-1))


def test_a_fused_optimizer_counts_its_steps_in_fp32_as_in_checkpoints():
    """A run under this oracle once could not go on from its own checkpoint."""
    model = nn.Linear(2, 2).double()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with exact_dtypes(model, every_cast=True):
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_what_prepares_samples_keeps_its_casts():
    pixels = torch.ones(2, dtype=torch.uint8)
    with exact_dtypes(nn.Linear(1, 1, dtype=torch.float64), every_cast=True):
        with kept_casts():
            assert {pixels.float().dtype, pixels.to(torch.float32).dtype} == {torch.float32}
        assert {pixels.float().dtype, pixels.to(torch.float32).dtype} == {torch.float64}
