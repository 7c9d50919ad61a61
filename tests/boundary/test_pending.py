"""A forgotten hetmesh.backward names itself, and nothing of it lasts: not over a failed step, not over World.close."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from hetmesh.boundary import World, abandon, backward, init, pending, redistribute
from hetmesh.errors import BoundaryError
from hetmesh.layout import Layout, MeshSpec

HERE = Layout(MeshSpec.make([0], a=1), (Replicate(),))


@pytest.fixture
def alone():
    """A job of this process alone, in which a boundary from rank 0 to itself is crossed."""
    world = init()
    yield world
    pending.drop()
    if dist.is_initialized():
        world.close()


def cross(x, **options):
    return redistribute(x, HERE, src=HERE, shape=tuple(x.shape), dtype=x.dtype, **options).to_local()


def weights():
    return torch.arange(4.0, requires_grad=True)


def test_loss_backward_is_refused_where_it_happens(alone):
    y = cross(weights(), name="vision->llm")
    with pytest.raises(BoundaryError, match=r"'vision->llm', .*: its gradient comes from loss.backward\(\).*call hetm"):
        y.sum().backward()
    x = weights()  # and the next step is as if nothing had happened
    backward(cross(x, name="vision->llm").sum())
    assert x.grad.tolist() == [1, 1, 1, 1]


def test_an_optimizer_step_without_a_backward_is_named_at_the_next_crossing(alone):
    x = weights()
    cross(x)
    cross(x, name="vision->llm")
    torch.optim.SGD([x], lr=1.0).step()
    says = (
        r"has not run since boundaries 'redistribute \d', 'vision->llm' was crossed, and an optimizer has made a step"
    )
    with pytest.raises(BoundaryError, match=says):
        cross(x)
    backward(cross(x).sum())
    assert x.grad.tolist() == [1, 1, 1, 1]


def test_the_same_boundary_and_microbatch_again_is_named(alone):
    x = weights()
    loss = sum(cross(x, name="vision->llm", microbatch=m).sum() for m in range(2))
    with pytest.raises(BoundaryError, match=r"'vision->llm' was crossed, and boundary 'vision->llm', microbatch 1"):
        cross(x, name="vision->llm", microbatch=1)
    del loss
    loss = sum(cross(x, name="vision->llm", microbatch=m).sum() for m in range(2))
    loss = loss + sum(cross(x).sum() for _ in range(2))  # without a name each is its own
    backward(loss)
    assert x.grad.tolist() == [4, 4, 4, 4]


def test_without_gradients_nothing_is_pending(alone):
    x = weights()
    for _ in range(2):
        cross(x, name="vision->llm", requires_grad=False)
        with torch.no_grad():
            cross(x, name="vision->llm")
    torch.optim.SGD([x], lr=1.0).step()
    cross(x.detach(), requires_grad=False)
    assert pending.drop() == ""


def test_world_close_names_what_was_forgotten(alone):
    cross(weights(), name="vision->llm")
    with pytest.raises(BoundaryError, match=r"World.close: hetmesh.backward has not run since boundary 'vision->llm'"):
        alone.close()
    assert not dist.is_initialized()
    world = init()  # and the next World knows nothing of it
    x = weights()
    backward(cross(x, name="vision->llm").sum())
    assert x.grad.tolist() == [1, 1, 1, 1]
    world.close()


def test_world_close_does_not_hide_the_error_that_led_to_it(alone):
    def step():
        try:
            cross(weights(), name="vision->llm")
            raise ZeroDivisionError
        finally:
            World.current().close()

    with pytest.raises(ZeroDivisionError):
        step()


@pytest.mark.parametrize(
    "fail",
    [
        lambda x: backward(cross(x)),  # no scalar
        lambda x: backward("loss"),
        lambda x: cross(x, name=3),
        lambda x: redistribute(x, HERE, src=HERE, shape=(5,), dtype=x.dtype),
    ],
)
def test_a_step_that_failed_leaves_no_token(alone, fail):
    """Its boundaries would send gradients in the next step's backward."""
    lost = weights()
    y = cross(lost, name="vision->llm")
    with pytest.raises(BoundaryError):
        fail(weights())
    x = weights()
    backward(cross(x, name="vision->llm").sum())
    assert x.grad.tolist() == [1, 1, 1, 1]
    assert lost.grad is None
    del y


def test_a_step_that_failed_in_other_code_is_abandoned(alone):
    lost, x = weights(), weights()
    cross(lost, name="vision->llm")
    abandon()
    backward(cross(x, name="vision->llm").sum())
    assert (x.grad.tolist(), lost.grad) == ([1, 1, 1, 1], None)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_result_shares_no_memory_with_its_source(alone, requires_grad):
    x = weights()
    y = cross(x, requires_grad=requires_grad)
    y.data.mul_(2)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shape": (-4, 3)}, r"shape must be whole numbers >= 0, got \(-4, 3\)"),
        ({"shape": (2.5,)}, r"shape must be whole numbers >= 0, got \(2.5,\)"),
        ({"shape": 4}, "shape must be whole numbers >= 0, got 4"),
        ({"shape": "4"}, "shape must be whole numbers >= 0, got '4'"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype or None, got 'float32'"),
        ({"dst": HERE.mesh}, "dst must be a hetmesh.Layout"),
        ({"src": (Replicate(),)}, "src must be a hetmesh.Layout or None"),
        ({"x": [1.0, 2.0]}, "x must be a tensor or None"),
        ({"requires_grad": 1}, "requires_grad must be True or False"),
        ({"name": 3}, "name must be a string or None"),
        ({"microbatch": -1}, "microbatch must be a whole number >= 0"),
        ({"grad_placements": 3, "dst": None}, "dst must be"),
        ({"transport": 5}, "transport 5 is unknown"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(alone, given, says):
    whole = {"x": torch.arange(4.0), "dst": HERE, "src": HERE, "shape": (4,), "dtype": torch.float32} | given
    with pytest.raises(BoundaryError, match=says):
        redistribute(whole.pop("x"), whole.pop("dst"), **whole)


@pytest.mark.parametrize("side", ["src", "dst"])
def test_ranks_beyond_the_world_are_refused_before_anything_is_sent(alone, side):
    beyond = Layout(MeshSpec.make([0, 9], a=2), (Replicate(),))
    given = {"src": HERE, "dst": HERE} | {side: beyond}
    with pytest.raises(Exception, match=r"Layout\(a=2.*ranks \[9\] do not exist: this job has ranks 0-0") as caught:
        redistribute(torch.arange(4.0), given["dst"], src=given["src"], shape=(4,), dtype=torch.float32)
    assert type(caught.value).__name__ == "LayoutError"
    assert alone.log.messages == ()
