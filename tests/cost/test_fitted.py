"""Fitted profiles: the fit against what made the numbers, and what a profile predicts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmesh.cost import Coefficients, LayerShape, LayerTime, Observation, Profile, WeightShape, Work, fit, layer_kind
from hetmesh.cost.fitted import COLLECTIVES, PARTS, HeldOut, non_negative_least_squares
from hetmesh.errors import HetmeshError

BLOCK = LayerShape("block", (WeightShape("w", (8, 8), 1, tp_dim=0),), attention_width=8)
TRUE = {
    "forward": Coefficients(1e-4, 2e-6, 3e-9),
    "backward_input": Coefficients(2e-4, 2e-6, 6e-9),
    "backward_weight": Coefficients(3e-4, 3e-6, 6e-9),
    "backward": Coefficients(4e-4, 4e-6, 6e-9),
}


def observe(rows, noise=0.0, seed=0):
    draw = np.random.default_rng(seed)
    return [
        Observation(layer_kind(BLOCK), part, n, n * n, TRUE[part].at(n, n * n) * (1 + noise * draw.uniform(-1, 1)))
        for n in rows
        for part in PARTS
    ]


def test_the_fit_finds_what_made_the_numbers():
    profile = fit(observe([8, 32, 128, 512, 2048]), observe([20, 900]))
    for part, found in profile.layers[layer_kind(BLOCK)].items():
        true = TRUE[part]
        assert (found.constant, found.per_row, found.per_pair) == pytest.approx(
            (true.constant, true.per_row, true.per_pair), rel=1e-6
        )
    assert profile.held_out.count == 8
    assert profile.held_out.largest < 1e-6


def test_small_and_large_rows_count_alike():
    profile = fit(observe([8, 32, 128, 512, 2048, 8192], noise=0.05), observe([12, 100, 5000], 0.05, seed=1))
    assert 0 < profile.held_out.mean < 0.06
    assert profile.held_out.largest < 0.12


def test_predictions_follow_what_is_frozen():
    profile = fit(observe([8, 32, 128]))
    work = Work(100, 2000)
    frozen = LayerShape("block", (WeightShape("w", (8, 8), 1, False, 0),), attention_width=8)
    at = {part: coefficients.at(100, 2000) for part, coefficients in TRUE.items()}
    trained = profile.predict(BLOCK, work, upstream=True, recompute=True)
    assert trained.backward_input == pytest.approx(at["backward_input"])
    assert trained.backward == pytest.approx(at["backward"] + at["forward"])
    assert profile.predict(BLOCK, work, upstream=False).backward == pytest.approx(at["backward_weight"])
    assert profile.predict(frozen, work, upstream=True).backward == pytest.approx(at["backward_input"])
    assert profile.predict(frozen, work, upstream=False, recompute=True) == LayerTime(pytest.approx(at["forward"]))


def test_both_parts_of_a_backward_take_what_was_measured_at_any_work():
    """Fits are noisy: the backward for the input alone may have more per pair, and less per row, than that for both."""
    parts = {**TRUE, "backward_input": Coefficients(5e-4, 1e-6, 9e-9)}
    profile = Profile({layer_kind(BLOCK): parts})
    for rows in (1, 100, 4096):
        time = profile.predict(BLOCK, Work(rows, rows * rows), upstream=True)
        assert time.backward == pytest.approx(TRUE["backward"].at(rows, rows * rows))
        assert time.backward_weight == pytest.approx(3e-6 * rows)


def test_collectives_have_a_backward_where_something_before_them_is_trained_and_errors_of_their_own(tmp_path):
    parts = dict(zip(COLLECTIVES, (Coefficients(1.0, 2.0), Coefficients(3.0, 0.0, 4.0)), strict=True))
    held_out = {"held_out": HeldOut(0.1, 0.2, 3), "collectives_held_out": HeldOut(0.3, 0.4, 5)}
    profile = Profile(collectives={"kind": parts}, **held_out)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    work = Work(100, 2000, 10)
    assert profile.collective_seconds("kind", work, False, upstream=True) == (201.0, 8003.0)
    assert profile.collective_seconds("kind", work, True, upstream=False) == (21.0, 0.0)
    assert profile.collective_seconds("other", work, True, upstream=True) is None


def test_a_degree_that_was_not_measured_splits_what_grows():
    profile = fit(observe([8, 32, 128]))
    forward = profile.predict(BLOCK, Work(100, 2000), upstream=False, tp=2).forward
    true = TRUE["forward"]
    assert forward == pytest.approx(true.constant + (true.at(100, 2000) - true.constant) / 2)


def test_kinds_know_sizes_and_not_names_or_training():
    same = LayerShape("other", (WeightShape("v", (8, 8), 1, False, 0),), attention_width=8)
    assert layer_kind(same) == layer_kind(BLOCK) == "attention 8; weights 8x8*; on rows; tp 1"
    assert layer_kind(BLOCK, 2) != layer_kind(BLOCK)
    assert layer_kind(LayerShape("x", (WeightShape("v", (8, 8), 0),), 8)) != layer_kind(BLOCK)


def test_saved_and_loaded(tmp_path):
    path = tmp_path / "profile.json"
    profile = fit(observe([8, 32, 128]), observe([64]), dtype="bfloat16")
    profile.save(path)
    assert Profile.load(path) == profile
    path.write_text("{}")
    with pytest.raises(HetmeshError, match="not one that `hetmesh profile` wrote"):
        Profile.load(path)


def test_what_is_missing_is_named():
    with pytest.raises(HetmeshError, match=r"no measurement of \['backward'\]"):
        fit(o for o in observe([8, 32]) if o.part != "backward")
    with pytest.raises(HetmeshError, match="layer 'new' is of kind"):
        fit(observe([8, 32])).predict(LayerShape("new"), Work(3), upstream=False)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_non_negative_least_squares_is_no_worse_than_any_other_point(seed):
    draw = np.random.default_rng(seed)
    a, b = draw.normal(size=(6, 3)), draw.normal(size=6)
    x = non_negative_least_squares(a, b)
    assert (x >= 0).all()
    gradient = a.T @ (a @ x - b)  # the conditions of Karush, Kuhn and Tucker
    assert (gradient >= -1e-8).all()
    assert abs(gradient @ x) < 1e-8
