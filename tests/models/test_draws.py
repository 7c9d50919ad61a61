"""What losses draw depends on seed, step, module and sample, and on nothing else."""

import torch

from hetmesh.models.draws import Draws


def drawn(seed=1, step=2, module="drawer", ids=("a", "b")):
    return Draws(seed, step).of(module, ids, [1] * len(ids), [6] * len(ids), 4)


def test_each_of_seed_step_module_and_sample_has_draws_of_its_own():
    others = (drawn(seed=2), drawn(step=3), drawn(module="other"), drawn(ids=("c", "d")))
    for key, value in drawn().items():
        assert torch.equal(value, drawn()[key])
        assert not any(torch.equal(value, other[key]) for other in others)


def test_a_sample_draws_the_same_whatever_is_drawn_beside_it():
    both, alone, turned = drawn(), drawn(ids=("b",)), drawn(ids=("b", "a"))
    for key, value in alone.items():
        assert torch.equal(both[key][len(value) :], value)
        assert torch.equal(turned[key][: len(value)], value)


def test_noise_is_normal_and_times_are_uniform():
    some = drawn(ids=tuple(map(str, range(500))))
    assert abs(float(some["noise"].mean())) < 0.05
    assert abs(float(some["noise"].std()) - 1) < 0.05
    assert abs(float(some["time"].mean()) - 0.5) < 0.05
    assert 0 <= float(some["time"].min()) <= float(some["time"].max()) < 1
