"""Dropout in whole runs: replicas stay equal whatever shares a rank, layouts of one lane equal one process, and the
check of replicas finds and names what is not equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetmesh.boundary import World
from hetmesh.errors import ReplicaError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import ParityError, compare, reference, run
from hetmesh.training.job import Job
from hetmesh.training.trainer import Trainer

RECIPES = Path(__file__).parents[2] / "recipes"
pytestmark = pytest.mark.slow

LORA = (
    "--modules.llm.lora.rank=4",
    "--modules.llm.lora.dropout=0.3",
    "--modules.vision.lora.rank=2",
    "--modules.vision.lora.dropout=0.3",
)
WHOLE = (  # linear layers whose inputs tensor parallelism does not split
    *LORA,
    '--modules.llm.lora.target_modules=["q_proj", "v_proj", "up_proj"]',
    '--modules.vision.lora.target_modules=["k_proj", "fc1"]',
)
RUN = ("--training.local_batch_size=4", "--training.dtype=float64")


def recipe(*keys: str, tables: dict[str, dict[str, object]]):
    overrides = [
        f"--parallelism.{name}.{key}={value}" for name, table in tables.items() for key, value in table.items()
    ]
    return load_recipe(RECIPES / "digits_single.toml", (*RUN, *keys, *overrides))


def on_this_rank(rank, recipe):
    return run(recipe, World.current())


COLOCATED = {
    "vision": {"ranks": "[0, 1]", "data_parallel_replicate_degree": 2},
    "llm": {"ranks": "[0, 1]", "tensor_parallel_degree": 2},
}


ATTENTION = "--modules.llm.config.attention_dropout=0.3", "--modules.vision.config.attention_dropout=0.3"
RECOMPUTED = "--parallelism.pipeline_parallel_schedule=three_phase", "--parallelism.three_phase_recompute=true"


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(LORA, marks=pytest.mark.exhaustive),
        (*LORA, "--activation_checkpoint.mode=full", "--parallelism.llm.pipeline_parallel_microbatch_size=2"),
        pytest.param(ATTENTION, marks=pytest.mark.exhaustive),
    ],
    ids=["LoRA", "LoRA, checkpointed", "attention"],
)
def test_replicas_stay_equal_where_another_module_draws_on_the_same_rank(pool, keys):
    """An encoder of two lanes draws differently on the two ranks of a tensor-parallel LLM; `run` checks replicas."""
    pool(2).run(on_this_rank, recipe(*keys, tables=COLOCATED))


LAYOUTS = {
    "TP": {"vision": {"ranks": "[0]"}, "llm": {"ranks": "[0, 1]", "tensor_parallel_degree": 2}},
    "PP": {"vision": {"ranks": "[0]"}, "llm": {"ranks": "[0, 1]", "pipeline_parallel_degree": 2}},
    "PP x TP": {
        "vision": {"ranks": "[0, 1]", "tensor_parallel_degree": 2},
        "llm": {"ranks": "[0, 1, 2, 3]", "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
    },
}


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        pytest.param("TP", ("--activation_checkpoint.mode=full",), marks=pytest.mark.exhaustive),
        pytest.param("PP", RECOMPUTED, marks=pytest.mark.exhaustive),
        ("PP x TP", ("--activation_checkpoint.mode=selective",)),
    ],
    ids=["TP, checkpointed", "PP, stages recomputed", "PP x TP"],
)
def test_layouts_of_one_lane_equal_one_process(pool, layout, keys):
    # A balancer looks at the layout, and may put a sample into another microbatch, where other numbers are drawn.
    keys = (*WHOLE, "--parallelism.llm.pipeline_parallel_microbatch_size=2", "--balance.policy=none", *keys)
    made = recipe(*keys, tables=LAYOUTS[layout])
    ranks = pool(2 if made.world_size == 2 else 4).run(on_this_rank, made)
    compare(reference(made, microbatches=True), ranks, 1e-10)
    other = recipe(*keys, "--modules.vision.lora.dropout=0.31", tables=LAYOUTS[layout])
    with pytest.raises(ParityError):  # so dropout does happen, in both modules
        compare(reference(other, microbatches=True), ranks, 1e-10)


def drifted(rank, recipe, name, by):
    """What `check_replicas` says on each rank when one of them has changed a parameter."""
    job = Job.assemble(resolve(recipe), World.current())
    job.check_replicas(0)
    if rank == 1:
        parameter = dict(job.root.named_parameters())[name]
        with torch.no_grad():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.view(-1)[0] += by
    try:
        job.check_replicas(5)
    except ReplicaError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["llm.model.norm.weight", "vision.encoder.layers.0.mlp.fc1.weight"])
def test_replicas_that_differ_are_named_with_module_ranks_and_step(pool, name):
    made = recipe("--debug.check_replicas=5", tables=COLOCATED)
    first, second = pool(2).run(drifted, made, name, 1e-12)
    assert first == second
    module, axis = ("llm", "tp") if name.startswith("llm") else ("vision", "dp_replicate")
    assert first == (
        "debug.check_replicas: after step 5 replicas of 1 parameters are not equal: "
        f"{name} (module {module!r}, {axis}: ranks [1] differ from ranks [0])"
    )
    assert pool(2).run(drifted, made, "llm.model.layers.0.mlp.up_proj.weight", 1.0) == [None, None]  # its own shard


def trained(rank, recipe):
    """What the trainer says on each rank, of which one has changed a parameter before the first of two steps."""
    trainer = Trainer(resolve(recipe), World.current())
    if rank == 1:
        with torch.no_grad():
            dict(trainer.job.root.named_parameters())["llm.model.norm.weight"][0] += 1.0
    said = []
    try:
        for _ in range(2):
            try:
                trainer.train_step()
                said.append("")
            except ReplicaError as error:
                said.append(str(error))
    finally:
        trainer.reporter.close()
    return said


def test_the_trainer_checks_every_so_many_steps(pool, tmp_path):
    made = recipe("--debug.check_replicas=2", f"--job.dump_folder={tmp_path}", tables=COLOCATED)
    for first, second in pool(2).run(trained, made):
        assert first == ""
        assert second.startswith("debug.check_replicas: after step 2 replicas of ")
        assert "llm.model.norm.weight (module 'llm', tp: ranks [1] differ from ranks [0])" in second or "more" in second
