"""Modules without memory, and what their constructors would have written into it."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.models import build_deferred, build_module
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from support import tiny_vlms

ROOT = Path(__file__).parents[2]


class Given:
    """An adapter of what a function makes."""

    def __init__(self, build):
        self.build = build


def alike(drawn: nn.Module, really: nn.Module) -> None:
    """What is constant is equal; what is drawn has the mean, the spread and the zeros of the constructor's own."""
    theirs = really.state_dict()
    assert list(drawn.state_dict()) == list(theirs)
    for name, ours in drawn.state_dict().items():
        a, b = ours.double(), theirs[name].double()
        assert (ours.shape, ours.dtype) == (theirs[name].shape, theirs[name].dtype), name
        spread = b.std().item() if b.numel() > 1 else 0.0
        if spread == 0 or name not in dict(really.named_parameters(remove_duplicate=False)):
            assert torch.equal(a, b), name
            continue
        n = b.numel()
        assert abs((a == 0).sum() - (b == 0).sum()) <= 2, name  # a uniform draw may hit 0, one in 2^24
        assert abs(a.mean() - b.mean()) < 6 * spread * (2 / n) ** 0.5, name
        assert abs(a.std() - spread) < 6 * spread / n**0.5, name
        if n > 1000 and b.abs().max() / spread < 2.5:  # bounded
            assert a.abs().max() == pytest.approx(b.abs().max().item(), rel=0.05), name


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_vlms.MODELS)
def test_models_of_transformers_begin_as_their_constructors_say(family):
    build = tiny_vlms.MODELS[family]
    deferred = build_deferred(Given(build), "m", 0)
    assert deferred.reason_built_whole is None
    assert all(parameter.is_meta for parameter in deferred.module.parameters())
    alike(deferred.materialized(), build())


RECIPES = ("digits", "digits_omni", "digits_qwen3vl")
"""Of all models that are built from sizes alone, but for Llama and CLIP (which `tiny_vlms` has)."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_ready_made_modules_begin_as_their_constructors_say(recipe):
    resolved = resolve(load_recipe(ROOT / f"recipes/{recipe}.toml"))
    for name, adapter in resolved.adapters.items():
        deferred = build_deferred(adapter, name, 0)
        assert deferred.reason_built_whole is None
        alike(deferred.materialized(), adapter.build())


class Own(nn.Module):
    """What users' constructors do."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(30, 70)
        nn.init.trunc_normal_(self.proj.weight, std=0.02, a=-0.03, b=0.03)
        self.register_buffer("table", torch.empty(7).fill_(2.0))
        self.register_buffer("beside", torch.arange(5.0, device=self.proj.weight.device))
        self.register_buffer("copied", self.proj.bias.detach().clone())
        self.register_buffer("scratch", torch.empty(3))
        self.positions = nn.Parameter(torch.randn(5, 30) * 0.1)
        self.gate = nn.Parameter(torch.empty(()))
        nn.init.constant_(self.gate, 0.5)
        shared = nn.Parameter(torch.ones(6))
        shared.note = "kept"
        self.first = self.second = shared
        shared.data.mul_(2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
        self.head = nn.Linear(30, 70, bias=False)
        self.head.weight = self.proj.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_users_constructors_do(dtype):
    deferred = build_deferred(Given(Own), "m", 0, dtype)
    assert deferred.reason_built_whole is None
    module = deferred.materialized()
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    assert torch.equal(module.table, torch.full((7,), 2.0, dtype=dtype))
    assert torch.equal(module.beside, torch.arange(5.0, dtype=dtype))
    assert torch.equal(module.copied, module.proj.bias)
    assert module.proj.weight is module.head.weight
    assert 0.025 < module.proj.weight.abs().max() < 0.0301
    assert module.first is module.second
    assert module.first.note == "kept"
    assert (module.first == 2).all()
    assert module.gate == 0.5
    assert 0.08 < module.positions.std() < 0.12
    layers = [dict(layer.named_parameters()) for layer in module.encoder.layers]
    assert all(torch.equal(layers[0][name], layers[1][name]) for name in layers[0])  # copies, as torch makes them
    single = build_module(Given(Own), "m", 0).state_dict()
    assert all(torch.equal(value, single[name].to(dtype)) for name, value in module.state_dict().items())


class Orthogonal(Own):
    def __init__(self):
        super().__init__()
        nn.init.orthogonal_(self.proj.weight)


class Measured(Own):
    def __init__(self):
        super().__init__()
        self.norm = self.proj.weight.norm().item()


class Swallowed(Own):
    def __init__(self):
        super().__init__()
        try:
            self.proj.weight.data.clamp_(max=self.proj.weight.detach().abs().mean().item())
        except RuntimeError:
            nn.init.zeros_(self.proj.weight)


class Beside(Own):
    def __init__(self):
        super().__init__()
        self.plain = torch.empty(4).fill_(3.0)


@pytest.mark.parametrize(
    ("model", "why"),
    [(Orthogonal, "qr"), (Measured, "norm"), (Swallowed, "mean"), (Beside, "neither parameter nor buffer")],
)
def test_modules_whose_constructors_compute_with_weights_are_built_eagerly(model, why):
    deferred = build_deferred(Given(model), "m", 0)
    assert why in deferred.reason_built_whole
    assert all(parameter.is_meta for parameter in deferred.module.parameters())
    first = deferred.materialized()
    torch.manual_seed(zlib.crc32(b"0:m"))
    really = model().state_dict()
    assert all(torch.equal(value, really[name]) for name, value in first.state_dict().items() if name != "scratch")
    assert (first.scratch == 0).all(), "as where it is drawn row by row"
    assert first.head.weight is first.proj.weight
    if model is Beside:
        assert (first.plain == 3).all()


def test_a_parameter_that_nothing_initialises_is_an_error():
    class Forgotten(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 4))

    with pytest.raises(RecipeError, match=r"modules.m: parameter weight: nothing initialises it"):
        build_module(Given(Forgotten), "m", 0)


def test_a_module_that_is_built_eagerly_has_no_parameter_without_values_either():
    class Forgotten(Orthogonal):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 4))

    with pytest.raises(RecipeError, match=r"modules.m: parameter weight: nothing initialises it"):
        build_module(Given(Forgotten), "m", 0)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "memory",
    [
        lambda: torch.empty_like(torch.ones(3, 4)),
        lambda: torch.ones(1).new_empty(3, 4),
        lambda: torch.empty_permuted((3, 4), (0, 1)),
        lambda: torch.empty(3, 4, dtype=torch.int32),
    ],
    ids=["empty_like", "new_empty", "empty_permuted", "integers"],
)
def test_memory_of_any_kind_that_nothing_was_written_to_is_an_error(memory):
    class Forgotten(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(memory(), requires_grad=False)

    with pytest.raises(RecipeError, match=r"modules.m: parameter weight: nothing initialises it"):
        build_module(Given(Forgotten), "m", 0)


def test_a_parameter_without_a_shape_is_an_error():
    with pytest.raises(RecipeError, match=r"modules.m: parameter weight has no shape yet; lazy modules"):
        build_module(Given(lambda: nn.LazyLinear(3)), "m", 0)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_memory_that_two_names_share_is_an_error(whole, kind):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            if whole:
                nn.init.orthogonal_(self.first.weight)
            if kind == "parameter":
                self.second = nn.Parameter(self.first.weight.data)
            else:
                self.register_buffer("second", self.first.weight.detach())

    with pytest.raises(RecipeError, match=rf"modules.m: (parameter first.weight|{kind} second) shares memory with"):
        build_module(Given(Shared), "m", 0)


def test_a_parameter_that_is_kept_beside_its_name_cannot_be_used_silently():
    """It would neither be sharded nor trained."""

    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            nn.init.orthogonal_(self.first.weight)
            self.weights = [self.first.weight]

    module = build_module(Given(Kept), "m", 0)
    with pytest.raises(RuntimeError):
        torch.ones(2, 3) @ module.weights[0]
