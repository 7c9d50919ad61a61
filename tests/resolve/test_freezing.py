"""Frozen modules and LoRA: parity on every placement, and nothing paid for what is frozen (U11, C3)."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from hetmesh.boundary import World
from hetmesh.checkpoint.initial_load import load_initial_weights
from hetmesh.cost import LayerShape, ModuleShape, WeightShape
from hetmesh.errors import RecipeError
from hetmesh.graph import Stage, stage_graph
from hetmesh.models.weights.freeze import freeze_by_name
from hetmesh.models.weights.lora import add_lora, base_name, is_adapter
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import check, compare, reference, run
from hetmesh.training.job import Job
from hetmesh.training.trainer import Trainer
from support import parity_cases
from support.often import combinations
from support.parity_cases import POLICIES, table

RECIPES = Path(__file__).parents[2] / "recipes"
PLACEMENTS = ("digits", "digits_colocated", "digits_overlapping")
WAYS = {
    "frozen encoder": ["--modules.vision.trainable=false"],
    "frozen LLM": ["--modules.llm.trainable=false"],
    "norms": ['--modules.vision.trainable=["norm"]', '--modules.llm.trainable=["norm", "!self_attn"]'],
    "projector only": ["--modules.vision.trainable=false", "--modules.llm.trainable=false"],
    "LoRA": ["--modules.vision.trainable=false", "--modules.projector.trainable=false", "--modules.llm.lora.rank=4"],
    "LoRA in encoder and some layers": [
        "--modules.vision.lora.rank=2",
        "--modules.llm.lora.rank=3",
        '--modules.llm.lora.target_modules=["q_proj", "down_proj"]',
    ],
}


def recipe_of(name, *overrides):
    return load_recipe(RECIPES / f"{name}.toml", ("--training.local_batch_size=4", *overrides))


def watched(rank, recipe):
    world = World.current()
    world.log.clear()
    outcome = run(recipe, world, steps=2)
    return outcome, {m.label.boundary for m in world.log.messages if m.label.direction == "backward"}


OFTEN = {
    ("digits_colocated", "LoRA in encoder and some layers"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), combinations(OFTEN, PLACEMENTS, WAYS))
def test_parity(pool4, name, way):
    recipe = recipe_of(name, "--training.dtype=float64", *WAYS[way])
    results = pool4.run(watched, recipe)
    assert compare(reference(recipe, steps=2), [outcome for outcome, _ in results], 1e-10) < 1e-10
    talked = set().union(*(boundaries for _, boundaries in results))
    if recipe.modules["vision"].lora is None and not recipe.modules["vision"].trainable:
        assert "vision->projector" not in talked  # no message back to a frozen encoder
    if way == "LoRA":
        assert not talked


def cost_of_training(rank, recipe, folder):
    """Bytes of gradients and optimizer state per module after one step, and the activations that were kept."""
    world = World.current()
    recipe = recipe.model_copy(update={"job": recipe.job.model_copy(update={"dump_folder": folder})})
    trainer = Trainer(resolve(recipe), world)
    trainer.train_step()
    trainer.reporter.close()
    parameters = {
        name: sum(0 if p.grad is None else p.grad.numel() for p in module.parameters())
        for name, module in trainer.job.root.named_children()
    }
    states = dict.fromkeys(parameters, 0)
    if trainer.optimizers is not None:
        for key, value in trainer.optimizers[0].state_dict().items():
            if key.startswith("state.") and isinstance(value, torch.Tensor):
                states[key.split(".")[1]] += value.numel()
    return parameters, states


@pytest.mark.slow
def test_what_is_frozen_has_no_gradient_and_no_optimizer_state(pool4, tmp_path):
    recipe = recipe_of("digits", *WAYS["LoRA"])
    for rank, (gradients, states) in enumerate(pool4.run(cost_of_training, recipe, str(tmp_path))):
        for module in gradients:
            if module == "llm":
                assert 0 < gradients[module] < 30_000, rank  # of 155,000 parameters
                assert states[module] > 0, rank
            else:
                assert gradients[module] == states[module] == 0, (rank, module)


def kept_activations(rank, recipe):
    """Bytes that autograd keeps of one forward of the encoder."""
    job = Job.assemble(resolve(recipe), World.current())
    kept = []
    if Stage("vision") in job.runtime.modules:
        adapted = job.runtime.modules[Stage("vision")]
        forward = adapted.forward

        def counting(batch, inputs):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
                return forward(batch, inputs)

        adapted.forward = counting
    drawn = next(job.loader)
    plan = job.plan([d.meta for d in drawn])
    job.runtime.run(job.schedule(plan), plan, job.feed(drawn, plan, 0), step=0)
    return sum(kept)


@pytest.mark.slow
def test_a_frozen_encoder_keeps_no_activations(pool4):
    assert pool4.run(kept_activations, recipe_of("digits"))[0] > 0
    assert pool4.run(kept_activations, recipe_of("digits", "--modules.vision.trainable=false")) == [0, 0, 0, 0]


def save_then_load(rank, folder, second, overrides=()):
    """Train two steps, save; start another recipe from it; return its weights and the saved ones."""
    world = World.current()
    first = recipe_of("digits", f"--job.dump_folder={folder}", *overrides)
    trainer = Trainer(resolve(first), world)
    trainer.train_step()
    trainer.train_step()
    trainer.save()
    trainer.reporter.close()
    saved = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in trainer.job.root.state_dict().items()}
    job = Job.assemble(resolve(second), world)
    before = {k: v.clone() for k, v in job.root.state_dict().items()}
    load_initial_weights(
        world, job.root, Path(folder) / "checkpoint" / "step-2", second.checkpoint.exclude_from_loading
    )
    wrong = []
    for name, value in job.root.state_dict().items():
        value = value.to_local() if hasattr(value, "to_local") else value
        fresh = is_adapter(name) or name.startswith("projector.")
        expected = before[name] if fresh else saved[base_name(name)]
        expected = expected.to_local() if hasattr(expected, "to_local") else expected
        if not torch.equal(value, expected.to(value.dtype)):
            wrong.append(name)
    return wrong


BF16 = ("--training.dtype=bfloat16",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), WAYS["LoRA"]),
        pytest.param((), (*BF16, *WAYS["LoRA"]), marks=pytest.mark.exhaustive),
        (BF16 + tuple(WAYS["frozen encoder"]), BF16),
    ],
)
def test_a_run_starts_from_the_weights_of_another(pool4, tmp_path, first, second):
    """Also where what is frozen was in bf16, or is."""
    loading = recipe_of("digits", *second, '--checkpoint.exclude_from_loading=["projector"]')
    assert pool4.run(save_then_load, str(tmp_path), loading, first) == [[], [], [], []]


def refused(rank, folder, exclude, overrides):
    job = Job.assemble(resolve(recipe_of("digits", *overrides)), World.current())
    with pytest.raises(RecipeError) as caught:
        load_initial_weights(World.current(), job.root, Path(folder), exclude)
    return str(caught.value)


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named(pool4, tmp_path):
    assert "no complete checkpoint" in pool4.run(refused, str(tmp_path), (), ())[0]
    pool4.run(save_then_load, str(tmp_path), recipe_of("digits", '--checkpoint.exclude_from_loading=["projector"]'))
    step = str(tmp_path / "checkpoint" / "step-2")
    assert "['visoin'] match no module" in pool4.run(refused, step, ("visoin",), ())[0]
    message = pool4.run(refused, step, (), ("--modules.llm.config.intermediate_size=128",))[2]
    assert "model.llm.model.layers.0.mlp.gate_proj.weight was float32 [256, 96] and is float32 [128, 96]" in message
    message = pool4.run(refused, step, (), ("--modules.vision.config.num_hidden_layers=3",))[0]
    assert "it lacks model.vision." in message


def test_gradients_stop_where_nothing_upstream_is_trainable():
    resolved = resolve(recipe_of("digits", "--modules.vision.trainable=false"))
    stages = resolved.graph
    assert not stages.backward_reaches("vision")
    assert stages.backward_reaches("projector")
    assert Stage("vision").index == 0


LATE = {
    "vision": "trainable = false",
    "projector": "trainable = false",
    "llm": r"trainable = ['layers\.3\.', 'model\.norm']",
}
"""What is trained begins in the last of two stages."""


SPLIT = ("zero_bubble",)
"""What has a backward in two parts."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [each if each in SPLIT else pytest.param(each, marks=pytest.mark.exhaustive) for each in POLICIES]
)
def test_a_stage_before_all_that_is_trained_has_no_backward(pool4, policy):
    given = parity_cases.recipe(policy, table("vision", "0-1"), table("llm", "0-3", pp=2, fsdp=2), **LATE)
    stages = stage_graph(resolve(given).graph)
    assert {stage.module for stage in stages.backward_stages} == {"llm"}
    assert Stage("llm") not in stages.backward_stages
    check(pool4, given, 2)


@pytest.mark.slow
def test_a_shared_weight_that_any_of_its_names_chooses_is_trained(pool4):
    given = parity_cases.recipe("1f1b", table("llm", "0-1", pp=2), tied=True, llm="trainable = ['lm_head']")
    check(pool4, given, 2)
    truth = reference(given, 2)
    (trained,) = [
        name for name, gradient in truth.gradients.items() if name.startswith("llm.") and gradient is not None
    ]
    assert trained == "llm.model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["bias"], {"block.inner.bias", "head.bias"}),
        (["!bias"], {"block.inner.weight", "head.weight"}),
        (["^block", "!bias"], {"block.inner.weight"}),
        ([r"^head\.weight$", "inner.b"], {"head.weight", "block.inner.bias"}),
    ],
)
def test_patterns_choose_parameters(patterns, trained):
    module = Tiny()
    freeze_by_name(module, patterns, "modules.tiny.trainable")
    assert {name for name, p in module.named_parameters() if p.requires_grad} == trained


def test_a_pattern_trains_nothing_that_its_class_has_frozen():
    module = Tiny()
    module.head.requires_grad_(False)
    freeze_by_name(module, ["weight"], "modules.tiny.trainable")
    assert {name for name, p in module.named_parameters() if p.requires_grad} == {"block.inner.weight"}


def test_patterns_that_match_nothing_are_named_with_what_there_is():
    module = nn.ModuleDict({"layers": nn.ModuleList([Tiny(), Tiny()])})
    says = (
        "modules.tiny.trainable = ['weight', '!nrom']: '!nrom' matches the name of no parameter; there are "
        "layers.*.block.inner.weight, layers.*.block.inner.bias, layers.*.head.weight, layers.*.head.bias"
    )
    with pytest.raises(RecipeError, match=f"^{re.escape(says)}$"):
        freeze_by_name(module, ["weight", "!nrom"], "modules.tiny.trainable")


def test_layers_count_as_trained_where_what_belongs_to_none_of_them_is():
    layers = [
        LayerShape(name, (WeightShape(f"{name}.w", (2, 2), 1, trained),))
        for name, trained in (("a", False), ("b", True))
    ]
    rest = LayerShape("", (WeightShape("table", (2, 2), 0, True),))
    assert ModuleShape("m", tuple(layers)).frozen_layers == {"a"}
    assert ModuleShape("m", (rest, *layers)).frozen_layers == set()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 5)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(5, 2)


class Options:
    rank, alpha, dropout, target_modules = 2, 4.0, 0.0, None


def test_lora_leaves_the_function_as_it_is_and_trains_only_adapters():
    module = Tiny().double()
    x = torch.randn(4, 3).double()
    before = module.block.inner(x)
    add_lora(module, Options(), "tiny", seed=0, layers=("block", "head"))
    assert torch.equal(module.block.inner(x), before)  # B is zero
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trainable == {"block.inner.lora_A.default.weight", "block.inner.lora_B.default.weight"}
    assert base_name("block.inner.base_layer.weight") == "block.inner.weight"
    again = Tiny().double()
    add_lora(again, Options(), "tiny", seed=0, layers=("block", "head"))
    assert torch.equal(again.block.inner.lora_A.default.weight, module.block.inner.lora_A.default.weight)


def test_lora_targets_that_do_not_exist_are_named():
    options = type("O", (Options,), {"target_modules": ("q_proj",)})
    with pytest.raises(RecipeError, match=r"no linear layer is called \['q_proj'\]; there are \['head', 'inner'\]"):
        add_lora(Tiny(), options(), "tiny", seed=0, layers=("block",))
    with pytest.raises(RecipeError, match="no linear layer inside"):
        add_lora(Tiny(), Options(), "tiny", seed=0, layers=("head",))
