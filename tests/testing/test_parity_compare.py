"""What the parity harness calls equal."""

from dataclasses import replace

import pytest
import torch

from hetmesh.testing.parity import TOLERANCE, Outcome, ParityError, compare


def outcomes(dtype, noise, weight=0.0):
    """What one process gave and what a rank gave: `weight` relative error in a gradient of norm 2, and `noise` in one
    that is mathematically zero."""
    generator = torch.Generator().manual_seed(0)
    grown = torch.nn.functional.normalize(torch.randn(50, dtype=torch.float64, generator=generator), dim=0) * 2
    zero = torch.full((4,), noise, dtype=torch.float64)
    truth = {"llm.weight": grown.to(dtype), "llm.bias": torch.zeros(4, dtype=dtype)}
    given = {"llm.weight": (grown * (1 + weight)).to(dtype), "llm.bias": zero.to(dtype)}
    return tuple(Outcome((1.0,), {}, tensors) for tensors in (truth, given))


@pytest.mark.parametrize(
    ("dtype", "noise", "weight"),
    [(torch.float32, 6e-8, 0.0), (torch.float32, 0.0, 5e-6), (torch.float64, 5e-14, 0.0), (torch.float64, 0.0, 5e-11)],
)
def test_rounding_of_what_is_mathematically_zero_is_equal(dtype, noise, weight):
    truth, given = outcomes(dtype, noise, weight)
    limit = TOLERANCE[str(dtype).removeprefix("torch.")]
    assert limit / 20 < compare(truth, [given], limit) < limit


@pytest.mark.parametrize(
    ("dtype", "noise", "weight"),
    [(torch.float32, 2e-7, 0.0), (torch.float32, 0.0, 2e-5), (torch.float64, 2e-13, 0.0), (torch.float64, 0.0, 2e-10)],
)
def test_what_is_more_than_rounding_is_not(dtype, noise, weight):
    truth, given = outcomes(dtype, noise, weight)
    with pytest.raises(ParityError, match="1 of 3 quantities differ"):
        compare(truth, [given], TOLERANCE[str(dtype).removeprefix("torch.")])


def test_the_norm_over_all_meshes_is_compared_where_a_run_gives_it():
    gradients = {"vision.weight": torch.full((9,), 1.0), "llm.weight": torch.full((4,), 2.0), "llm.bias": None}
    truth, other = Outcome((1.0,), gradients, {}), Outcome((0.0,), gradients, {})
    assert compare(truth, [replace(truth, norm=5.0), other], 1e-10) == 0
    with pytest.raises(ParityError, match=r"1 of 8 quantities .* gradient norm on rank 1"):
        compare(truth, [truth, replace(other, norm=5.001)], 1e-10)
