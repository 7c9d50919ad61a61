"""The bound of the self-check: relative, and as large as what rounding changes, in models of any depth and size."""

from __future__ import annotations

import pytest
import torch

from hetmesh.errors import SelfCheckError
from hetmesh.models.split.llm_half import HfLlmAdapter
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.verify.self_check import MAX_TOLERANCE, TOLERANCE, check_close, relative, self_check
from support import tiny_vlms

ROWS = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]])


def test_differences_are_relative_to_their_row_and_rows_close_to_zero_to_the_largest():
    given = ROWS.clone()
    given[0, 0] += 0.05
    assert relative(given, ROWS) == pytest.approx(0.01)
    given = ROWS.clone()
    given[1, 0] = 1e-5
    assert relative(given, ROWS) == pytest.approx(1e-3)
    assert relative(ROWS[:0], ROWS[:0]) == 0.0


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_bound_scales_with_the_values(size):
    check_close(ROWS * size * (1 + TOLERANCE / 2), ROWS * size, "they")
    with pytest.raises(SelfCheckError, match=r"they differ from transformers' by up to .* of a row's size"):
        check_close(ROWS * size * (1 + 2 * TOLERANCE), ROWS * size, "they")


def test_the_bound_grows_with_rounding_up_to_a_limit():
    check_close(ROWS * (1 + 10 * TOLERANCE), ROWS, "they", noise=5 * TOLERANCE)
    with pytest.raises(
        SelfCheckError, match=r"although with these weights rounding of the tokens alone changes 1\.0e-01"
    ):
        check_close(ROWS * (1 + 2 * MAX_TOLERANCE), ROWS, "they", noise=0.1)
    with pytest.raises(SelfCheckError, match=r"they have shape \(2, 2\)"):
        check_close(ROWS[:2], ROWS, "they")


def deep(tmp_path, monkeypatch, deviation):
    """A model of 24 layers whose weights have that deviation."""
    model = {"llava": lambda: tiny_vlms._llava(text=tiny_vlms._text(num_hidden_layers=24))}
    monkeypatch.setattr(tiny_vlms, "MODELS", model)
    tiny_vlms.build("llava", deviation).save_pretrained(tmp_path / "llava")
    return parse_recipe(tiny_vlms.recipe_text(tmp_path / "llava"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "deviation",
    [
        pytest.param(0.02, id="logits of 0.01", marks=pytest.mark.exhaustive),
        pytest.param(1.0, id="saturated attention, logits of 16"),
    ],
)
def test_deep_models_pass_and_a_factor_that_is_slightly_wrong_is_found(tmp_path, monkeypatch, deviation):
    recipe = deep(tmp_path, monkeypatch, deviation)
    assert self_check(recipe) < 1e-2  # with the larger weights rounding alone gives 8e-4

    logits = HfLlmAdapter.logits
    monkeypatch.setattr(HfLlmAdapter, "logits", lambda *given: logits(*given) * 1.002)
    with pytest.raises(SelfCheckError, match=r"module 'llm': its head's logits"):
        self_check(recipe)


@pytest.mark.slow
def test_one_wrong_layer_among_many_is_found(tmp_path, monkeypatch):
    recipe = deep(tmp_path, monkeypatch, 0.2)
    build = HfLlmAdapter.build

    def with_other_epsilon(self):
        module = build(self)
        self.decoder_of(module).layers[11].post_attention_layernorm.variance_epsilon = 1e-3
        return module

    monkeypatch.setattr(HfLlmAdapter, "build", with_other_epsilon)
    with pytest.raises(SelfCheckError, match=r"module 'llm': its decoder's output"):
        self_check(recipe)
