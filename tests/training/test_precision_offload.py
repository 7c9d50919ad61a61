"""Computing in bf16 over fp32 parameters, and parameters that live on the CPU."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import reference, run

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_overlapping.toml"
SMALL = ("--training.local_batch_size", "8", "--parallelism.llm.pipeline_parallel_microbatch_size", "4")
BF16 = ("--training.mixed_precision_param", "bfloat16")
LAYOUTS = {
    "data parallel": (),
    "tensor parallel": (
        "--parallelism.llm.data_parallel_replicate_degree=1",
        "--parallelism.llm.tensor_parallel_degree=2",
    ),
    "FSDP": (
        *("--parallelism.vision.data_parallel_replicate_degree=1", "--parallelism.vision.data_parallel_shard_degree=3"),
        *("--parallelism.llm.data_parallel_replicate_degree=1", "--parallelism.llm.data_parallel_shard_degree=2"),
    ),
    "FSDP x TP": (
        *("--parallelism.llm.ranks=0-3", "--parallelism.llm.data_parallel_replicate_degree=1"),
        *("--parallelism.llm.data_parallel_shard_degree=2", "--parallelism.llm.tensor_parallel_degree=2"),
    ),
}


@dataclass
class Spy:
    """Notes the dtypes in which linear layers of each module compute."""

    def __call__(self, job):
        self.computed = {stage.module: set() for stage in job.runtime.modules}
        for stage, module in job.runtime.modules.items():
            for part in module.modules():
                if isinstance(part, nn.Linear):
                    part.register_forward_hook(lambda _, __, out, name=stage.module: self.computed[name].add(out.dtype))
        self.job = job


def on_this_rank(rank, recipe):
    world, spy = World.current(), Spy()
    world.log.clear()
    outcome = run(recipe, world, steps=2, fault=spy)
    states = {p.dtype for p in spy.job.root.parameters()} | {
        p.grad.dtype for p in spy.job.root.parameters() if p.grad is not None
    }
    received = {b.name: world.log.bytes_received(b.name) for b in spy.job.graph.boundaries}
    return outcome, spy.computed, states, received


def some(layouts):
    """FSDP x TP by default; it does what the others do."""
    return [name if name == "FSDP x TP" else pytest.param(name, marks=pytest.mark.exhaustive) for name in layouts]


def error(expected, outcomes, module):
    """Relative error of the whole gradient of a module, on the first rank that holds it."""
    held = next(o.gradients for o in outcomes if any(k.startswith(f"{module}.") for k in o.gradients))
    names = [k for k in expected.gradients if k.startswith(f"{module}.")]
    one = torch.cat([expected.gradients[k].flatten() for k in names])
    other = torch.cat([held[k].flatten() for k in names])
    return float((one - other).norm() / one.norm())


@pytest.mark.slow
@pytest.mark.parametrize("where", some(LAYOUTS))
def test_bf16_computes_in_bf16_and_keeps_the_rest_in_fp32(pool4, where):
    exact = load_recipe(RECIPE, (*SMALL, *LAYOUTS[where]))
    recipe = load_recipe(RECIPE, (*SMALL, *LAYOUTS[where], *BF16))
    full = pool4.run(on_this_rank, exact, timeout=120)
    half = pool4.run(on_this_rank, recipe, timeout=120)
    for _, computed, states, _ in half:
        assert all(found == {torch.bfloat16} for found in computed.values())
        assert states <= {torch.float32}
    for (*_, whole), (*_, halved) in zip(full, half, strict=True):
        assert {name: 2 * size for name, size in halved.items()} == whole
    expected, outcomes = reference(exact, steps=2), [outcome for outcome, *_ in half]
    for step, loss in enumerate(expected.losses):
        assert sum(o.losses[step] for o in outcomes) == pytest.approx(loss, rel=5e-3)
    errors = {module: error(expected, outcomes, module) for module in ("vision", "projector", "llm")}
    assert max(errors.values()) < 0.05, errors
    assert min(errors.values()) > 1e-5  # it was not fp32 all the same


@pytest.mark.slow
def test_each_module_has_its_own_precision_and_rows_travel_in_their_producers(pool4):
    recipe = load_recipe(RECIPE, (*SMALL, "--modules.vision.mixed_precision_param", "bfloat16"))
    exact = load_recipe(RECIPE, SMALL)
    full, half = pool4.run(on_this_rank, exact, timeout=120), pool4.run(on_this_rank, recipe, timeout=120)
    for (*_, whole), (_, computed, _, received) in zip(full, half, strict=True):
        assert received["vision->projector"] * 2 == whole["vision->projector"]
        assert received["projector->llm"] == whole["projector->llm"]
        assert computed.get("llm", {torch.float32}) == {torch.float32}
        assert computed.get("vision", {torch.bfloat16}) == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("where", some(["FSDP", "FSDP x TP"]))
def test_offloaded_parameters_change_nothing(pool4, where):
    """On CPUs there is nothing to move; what the policy does besides must be exact."""
    offload = ("--training.enable_cpu_offload", "true")
    overrides = (*SMALL, *LAYOUTS[where])
    plain = pool4.run(on_this_rank, load_recipe(RECIPE, overrides), timeout=120)
    moved = pool4.run(on_this_rank, load_recipe(RECIPE, (*overrides, *offload)), timeout=120)
    for (one, *_), (other, *_) in zip(plain, moved, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((*BF16, "--training.dtype", "float64"), "training.mixed_precision_param = 'bfloat16' needs training.dtype = "),
        (
            ("--training.dtype", "float64", "--modules.llm.mixed_precision_param", "bfloat16"),
            "modules.llm.mixed_precision_param = 'bfloat16' needs",
        ),
        (
            ("--training.dtype", "bfloat16", "--training.mixed_precision_param", "float32"),
            "training.mixed_precision_param = 'float32' needs training.dtype = 'float32', got 'bfloat16'",
        ),
        (("--training.enable_cpu_offload", "true"), "training.enable_cpu_offload: it moves the shards of modules with"),
    ],
)
def test_what_does_not_go_together_is_an_error(overrides, says):
    with pytest.raises(RecipeError, match=says.replace(".", r"\.")):
        resolve(load_recipe(RECIPE, overrides))
