"""`[training] dtype = "bfloat16"`: bf16 parameters, of which the optimizer has fp32 copies."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.data.loader import Loader
from hetmesh.inference.generate import answer_tokens
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.samples import held_out_source
from hetmesh.training.job import Job
from hetmesh.training.one_process import OneProcess
from hetmesh.training.trainer import Trainer
from support import parity_cases
from support.parity_cases import table

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_overlapping.toml"
STEPS = 3
SMALL = (
    *(
        "--training.dtype=bfloat16",
        "--training.global_batch_size=8",
        f"--training.steps={STEPS}",
        "--balance.policy=none",
    ),
    *("--optimizer.lr=2e-3", "--lr_scheduler.warmup_steps=0", "--training.max_norm=0", "--profiling.timeline=false"),
    *("--lr_scheduler.decay_ratio=0", "--metrics.enable_tensorboard=false", "--checkpoint.enable=true"),
    *("--validation.samples=4", '--modules.vision.trainable=["!patch_embedding"]', "--checkpoint.interval=2"),
)


def layout(llm, vision="0", **degrees):
    """The LLM on its ranks, the encoder on its own."""
    own = {"data_parallel_replicate_degree": 1} | degrees
    keys = [f"--parallelism.llm.{key}={value}" for key, value in own.items()]
    count = len(load_ranks(vision))
    return (
        *(f"--parallelism.vision.ranks={vision}", f"--parallelism.vision.data_parallel_replicate_degree={count}"),
        *(f"--parallelism.llm.ranks={llm}", "--parallelism.llm.pipeline_parallel_microbatch_size=2"),
        *keys,
    )


def load_ranks(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


ALONE = (*layout("0"), "--training.local_batch_size=8")
LAYOUTS = {
    "pipeline": (
        *layout("0-1", pipeline_parallel_degree=2, pipeline_parallel_schedule="1f1b"),
        "--training.local_batch_size=8",
    ),
    "split backward": (
        *layout("0-1", pipeline_parallel_degree=2, pipeline_parallel_schedule="zero_bubble"),
        "--training.local_batch_size=8",
    ),
    "tensor parallel": (
        *layout("0-3", "0-1", tensor_parallel_degree=2, data_parallel_replicate_degree=2),
        "--training.local_batch_size=4",
    ),
    "FSDP": (*layout("0-3", "0-1", data_parallel_shard_degree=4), "--training.local_batch_size=2"),
    "FSDP in a pipeline": (
        *layout("0-3", "0-1", pipeline_parallel_degree=2, data_parallel_shard_degree=2),
        "--training.local_batch_size=4",
    ),
}


def given(folder, *overrides):
    return load_recipe(RECIPE, (*SMALL, f"--job.dump_folder={folder}", *overrides))


def by_hand(recipe):
    """Losses and fp32 parameters of a plain loop over bf16 modules, with fp32 copies and gradients beside them."""
    resolved = resolve(recipe)
    source, adapters, graph, o = resolved.source, resolved.adapters, resolved.graph, recipe.optimizer
    modules = {name: loaded_module(recipe, adapters[name], name) for name in graph.order}
    named = {f"{n}.{key}": p for n, module in modules.items() for key, p in module.named_parameters()}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in trained.items()}
    for p in trained.values():
        p.data = p.data.bfloat16()
    optimizer = torch.optim.AdamW(
        copies.values(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True
    )
    loader, losses = Loader(source, 8, resolved.expander, seed=recipe.debug.seed), []
    for _ in range(STEPS):
        drawn = next(loader)
        targets, total = 0, 0.0
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        for first in range(0, 8, 2):
            part, rows = drawn[first : first + 2], {}
            samples = loader.load(part)
            for name in graph.order:
                metas = [d.meta for d in part]
                batch = adapters[name].collate(samples, metas, placeholders=source.placeholders, pad_id=source.pad_id)
                inputs = {b.source: rows[b.source] for b in graph.inputs(name)}
                rows[name] = adapters[name].forward(modules[name], halved(batch), inputs)
            loss = nn.functional.cross_entropy(rows[graph.llm.name].float(), batch["targets"], reduction="sum")
            loss.backward()
            total, targets = total + loss.double().item(), targets + len(batch["targets"])
            for name, p in trained.items():
                if p.grad is not None:
                    copies[name].grad += p.grad.float()
                p.grad = None
        for copy in copies.values():
            copy.grad *= 1 / targets
        optimizer.step()
        for name, p in trained.items():
            p.data.copy_(copies[name])
        losses.append(total / targets)
    return losses, {name: copies.get(name, p).detach() for name, p in named.items()}


def halved(batch):
    return {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}


def train(rank, recipe, steps):
    """Losses of some steps, and the state of modules and optimizers after them, in full."""
    trainer, losses = Trainer(resolve(recipe), World.current()), []
    trainer.reporter.close()
    while trainer.step < steps:
        losses.append(trainer.train_step().loss)
        if trainer.step == 2 and recipe.checkpoint.enable:
            trainer.validate()
            trainer.save()
    state = {**trainer.job.root.state_dict(), **trainer.optimizers[0].state_dict()}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    trainer.upcoming.close()
    return losses, {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in tensors.items()}


def test_three_steps_equal_a_plain_loop_with_fp32_copies_to_the_last_bit(world, tmp_path):
    recipe = given(tmp_path, *ALONE, "--checkpoint.enable=false")
    losses, state = train(0, recipe, STEPS)
    expected, parameters = by_hand(recipe)
    assert losses == expected
    frozen = [name for name, value in parameters.items() if value.dtype == torch.bfloat16]
    assert frozen
    assert all("patch_embedding" in name for name in frozen)
    for name, value in parameters.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name


def test_answers_are_computed_in_fp32_also_by_what_was_frozen(world, tmp_path):
    recipe = given(tmp_path, *ALONE, "--modules.projector.trainable=false")
    train(0, recipe, 2)
    model = OneProcess.load(recipe, SavedRun(recipe, tmp_path / "checkpoint" / "step-2"))
    assert {p.dtype for module in model.modules.values() for p in module.parameters()} == {torch.float32}
    assert len([*answer_tokens(model, held_out_source(recipe), 0, max_tokens=2)]) <= 2


EXACT = ("pipeline", "split backward")  # which add nothing up in another order
CASES = [name if name == "FSDP in a pipeline" else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layouts_train_alike_and_go_on_from_each_others_checkpoints(pool, tmp_path, name):
    """What one saves the other has to the last bit, and what follows is alike up to rounding in bf16."""
    (alone,) = pool(1).run(train, given(tmp_path / "alone", *ALONE), STEPS, timeout=120)
    spread = pool(given(tmp_path, *LAYOUTS[name]).world_size)
    for losses, _ in spread.run(train, given(tmp_path / "other", *LAYOUTS[name]), STEPS, timeout=120):
        assert losses == (alone[0] if name in EXACT else pytest.approx(alone[0], rel=5e-3))
    for saved in ("alone", "other"):
        runs = ((pool(1), ALONE), (spread, LAYOUTS[name]))
        both = [own.run(train, given(tmp_path / saved, *keys), 2, timeout=120) for own, keys in runs]
        (_, whole), *_ = both[0]
        for _, state in both[1]:
            assert all(torch.equal(value, whole[key]) for key, value in state.items())
        assert {v.dtype for k, v in whole.items() if "patch_embedding" in k} == {torch.bfloat16}
        reader, keys = runs[saved == "alone"]
        for losses, _ in reader.run(train, given(tmp_path / saved, *keys), STEPS, timeout=120):
            assert losses == pytest.approx(alone[0][2:], rel=5e-3)


TWO = table("vision", "0-1")
FEATURES = {
    "tied": ("interleaved", [TWO, table("llm", "0-1", pp=2)], {"tied": True}),
    "experts that move": (
        "sequential",
        [TWO, table("llm", "0-3", tp=2, expert_parallel_degree=2) + "\nexpert_placement_interval = 1"],
        {"experts": True},
    ),
    "sharded experts": ("sequential", [TWO, table("llm", "0-3", fsdp=4, expert_parallel_degree=2)], {"experts": True}),
    "SP": ("1f1b", [TWO, table("llm", "0-3", pp=2, tp=2) + "\nenable_sequence_parallel = true"], {}),
    "CP": ("sequential", [TWO, table("llm", "0-3", context_parallel_degree=4)], {}),
    "LoRA, FSDP x TP": ("sequential", [TWO, table("llm", "0-3", fsdp=2, tp=2)], {"trained": "lora"}),
    "LoRA, split backward": ("zero_bubble", [TWO, table("llm", "0-3", pp=2, tp=2)], {"trained": "lora"}),
    "recomputed phases": (
        "three_phase",
        [TWO, table("llm", "0-3", pp=2, tp=2)],
        {"extra": "three_phase_recompute = true"},
    ),
    "slices": ("bubble_fill", [table("vision", "0-3"), table("llm", "0-3", pp=2, tp=2)], {}),
    "recomputed": ("1f1b", [TWO, table("llm", "0-3", pp=2, tp=2), '[activation_checkpoint]\nmode = "selective"'], {}),
}


def steps_of(rank, recipe):
    """Loss and norm of three steps of a loop of one's own."""
    job = Job.assemble(resolve(recipe), World.current())
    trained = [p for p in job.parameters() if p.requires_grad]
    optimizer, taken = torch.optim.AdamW(trained, lr=1e-2, foreach=False) if trained else None, []
    for step in range(1, 4):
        result = job.forward_backward(1.0)
        assert {p.dtype for p in trained} | {p.grad.dtype for p in trained if p.grad is not None} <= {torch.float32}
        if optimizer is not None:
            optimizer.step()
        taken.append((result.loss, result.grad_norm))
        job.expert_placement.after_step(step, ([optimizer], None) if optimizer is not None else None)
    job.upcoming.close()
    return taken


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FEATURES)
def test_features_train_as_one_process(pool4, name):
    policy, layout, options = FEATURES[name]

    def given(policy, layout, **options):
        made = parity_cases.recipe(policy, *layout, batch=2, **options).with_global_batch_size(8)
        made = parity_cases.packed(made) if options.get("experts") else made
        return made.model_copy(update={"training": made.training.model_copy(update={"dtype": "bfloat16"})})

    ran = pool4.run(steps_of, given(policy, layout, **options), timeout=120)[0]
    alone = [table("vision", "0"), table("llm", "0"), *layout[2:]]
    kept = {key: value for key, value in options.items() if key != "extra"}
    expected = pool4.run(steps_of, given("sequential", alone, **kept), timeout=120)[0]
    for (loss, norm), (true_loss, true_norm) in zip(ran, expected, strict=True):
        assert loss == pytest.approx(true_loss, rel=2e-2)
        assert norm == pytest.approx(true_norm, rel=5e-2)
