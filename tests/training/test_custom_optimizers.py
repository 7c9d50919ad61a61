"""Optimizers that a recipe names by their classes: alike in every layout, in checkpoints too, or refused."""

import re
from pathlib import Path

import pytest
import tomli
import torch
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.cost.shapes import OptimizerNeeds
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.recipe.section import FrozenDict
from hetmesh.report.explain import explain
from hetmesh.resolve.optimizer_choice import chosen_optimizer, group_of
from hetmesh.resolve.optimizer_probe import optimizer_kind
from hetmesh.resolve.resolved import resolve
from hetmesh.training import optimizers
from hetmesh.training.job import Job
from support import custom_optimizers, parity_cases
from support.parity_cases import table
from support.whole_runs import run_whole

ROOT = Path(__file__).parents[2]
OWN = "support.custom_optimizers"
MUON = """
[optimizer]
name = "torch.optim:Muon"
lr = 0.03
weight_decay = 0.05
options = { momentum = 0.8, eps = 1e-3, adjust_lr_fn = "match_rms_adamw" }
[[optimizer.param_groups]]
pattern = 'norm|bias|embed|lm_head|experts'
optimizer_name = "AdamW"
optimizer_kwargs = { lr = 1e-2, eps = 0.01 }
"""
"""Matrices of blocks by Muon, which has them whole; all else by AdamW."""
ADAFACTOR = """
[optimizer]
name = "torch.optim:Adafactor"
lr = 0.03
options = { eps = [0.01, 1e-3] }
"""
"""Which keeps a number for each row and for each column."""
ROWS = f"""
[optimizer]
name = "AdamW"
eps = 0.01
[[optimizer.param_groups]]
pattern = '^llm'
optimizer_name = "{OWN}:RowNorms"
"""
SIGNS = f"""
[optimizer]
name = "{OWN}:SignMomentum"
lr = 0.01
options = {{ power = 2.0 }}
"""
OPTIMIZERS = {"Muon": MUON, "Adafactor": ADAFACTOR, "rows": ROWS, "signs": SIGNS}

BOTH = [("vision", "0-1"), ("llm", "0-1")]
LAYOUTS = {
    "replicas": [table(*at, data_parallel_replicate_degree=2) for at in BOTH],
    "FSDP": [table(*at, fsdp=2) for at in BOTH],
    "TP": [table(*at, tp=2) for at in BOTH],
    "FSDP x TP": [table("vision", "0-3", fsdp=4), table("llm", "0-3", fsdp=2, tp=2)],
    "SP": [table("vision", "0-1"), table("llm", "2-3", tp=2) + "\nenable_sequence_parallel = true"],
    "pipeline": [table("vision", "1-2", fsdp=2), table("llm", "0-3", pp=2, fsdp=2)],
    "CP": [table("vision", "0-1", tp=2), table("llm", "0-3", fsdp=2, context_parallel_degree=2)],
}
ALONE = [table("vision", "0"), table("llm", "0")]
STEPS = 3


def recipe(folder, optimizer: str, layout, *more: str, policy: str = "1f1b", **options) -> Recipe:
    given = parity_cases.recipe(policy, *layout, optimizer, *more, batch=4, **options).with_global_batch_size(8)
    return given.model_copy(update={"job": given.job.model_copy(update={"dump_folder": str(folder)})})


def check_same(found, expected):
    """The parameters of all ranks' runs, and their losses."""
    whole = expected[0].parameters
    for ran in found:
        assert ran.losses == pytest.approx(expected[0].losses[-len(ran.losses) :], rel=1e-10)
        for name, parameter in ran.parameters.items():
            error = (parameter - whole[name]).norm() / max(whole[name].norm(), 1e-3)
            assert error < 1e-10, (name, error)
    assert set().union(*(ran.parameters for ran in found)) == set(whole)


CASES = [
    ("Muon", "FSDP x TP"),
    *(pytest.param(name, "FSDP x TP", marks=pytest.mark.exhaustive) for name in OPTIMIZERS if name != "Muon"),
    pytest.param("Muon", "pipeline", marks=pytest.mark.exhaustive),
    *(pytest.param("Muon", at, marks=pytest.mark.exhaustive) for at in ("replicas", "FSDP", "TP", "SP", "CP")),
    *(pytest.param("Adafactor", at, marks=pytest.mark.exhaustive) for at in ("pipeline", "replicas")),
    *(pytest.param("rows", layout, marks=pytest.mark.exhaustive) for layout in ("TP", "CP")),
    pytest.param("signs", "pipeline", marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "layout"), CASES)
def test_a_layout_equals_one_process(pool4, tmp_path, optimizer, layout):
    """Also with frozen and with overridden modules."""
    options = {"vision": "lr = 0.02\nweight_decay = 0.2", "trained": "all"}
    alone = recipe(tmp_path / "alone", OPTIMIZERS[optimizer], ALONE, **options)
    parallel = recipe(tmp_path / "parallel", OPTIMIZERS[optimizer], LAYOUTS[layout], **options)
    expected = pool4.run(run_whole, alone, STEPS)
    check_same(pool4.run(run_whole, parallel, STEPS), expected)


def run_on_shards(rank, recipe, steps):
    """`run_whole` where each rank orthogonalises its shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers._OnPlainTensors, "_gathers", lambda *_: False)
        return run_whole(rank, recipe, steps)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_update_of_shards_would_be_found(pool4, tmp_path):
    expected = pool4.run(run_whole, recipe(tmp_path / "alone", MUON, ALONE), 2)
    found = pool4.run(run_on_shards, recipe(tmp_path / "parallel", MUON, LAYOUTS["FSDP"]), 2)
    with pytest.raises(AssertionError, match="comparison failed"):
        check_same(found, expected)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["Muon", "signs"])
def test_experts_on_different_ranks_equal_one_process(pool4, tmp_path, optimizer):
    options = {"experts": True, "policy": "sequential"}
    layout = [table("vision", "0-1"), table("llm", "0-3", fsdp=2, tp=2, expert_parallel_degree=2)]
    if optimizer == "signs":
        layout[1] += "\nexpert_placement_interval = 1"
    packed = [
        parity_cases.packed(recipe(tmp_path / name, OPTIMIZERS[optimizer], at, **options))
        for name, at in (("alone", ALONE), ("parallel", layout))
    ]
    expected = pool4.run(run_whole, packed[0], STEPS)
    check_same(pool4.run(run_whole, packed[1], STEPS), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "first", "then"),
    [
        pytest.param("Muon", "FSDP x TP", "pipeline", marks=pytest.mark.exhaustive),
        pytest.param("Muon", "replicas", "TP", marks=pytest.mark.exhaustive),
        pytest.param("Adafactor", "TP", "FSDP", marks=pytest.mark.exhaustive),
        pytest.param("Adafactor", "pipeline", "FSDP x TP", marks=pytest.mark.exhaustive),
        pytest.param("rows", "FSDP", "SP", marks=pytest.mark.exhaustive),
        pytest.param("signs", "CP", "TP", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_goes_on_in_another_layout(pool4, tmp_path, optimizer, first, then):
    saving = "[checkpoint]\nenable = true\n[lr_scheduler]\nwarmup_steps = 3"
    expected = pool4.run(run_whole, recipe(tmp_path / "alone", OPTIMIZERS[optimizer], ALONE, saving), 5)
    pool4.run(run_whole, recipe(tmp_path / "run", OPTIMIZERS[optimizer], LAYOUTS[first], saving), 2)
    found = pool4.run(run_whole, recipe(tmp_path / "run", OPTIMIZERS[optimizer], LAYOUTS[then], saving), 5)
    assert {ran.first for ran in found} == {2}
    check_same(found, expected)


def sharded_state(rank, given):
    """For each tensor like a sharded parameter that optimizers keep after a step, whether it is sharded as that is."""
    job = Job.assemble(resolve(given), World.current())
    made, _ = optimizers.make_optimizers(given, job.root)
    job.forward_backward()
    made.step()
    states = [(p, state) for each in made for p, state in each.state.items() if isinstance(p, DTensor)]
    like = [(p, v) for p, state in states for v in state.values() if isinstance(v, torch.Tensor) and v.shape == p.shape]
    return [isinstance(v, DTensor) and v.placements == p.placements for p, v in like]


@pytest.mark.slow
def test_of_whole_parameters_each_rank_keeps_its_share_of_the_state(pool4, tmp_path):
    for found in pool4.run(sharded_state, recipe(tmp_path, MUON, LAYOUTS["FSDP x TP"])):
        assert len(found) > 10
        assert all(found)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_another_optimizer_does_not_go_on(pool4, tmp_path):
    saving = "[checkpoint]\nenable = true"
    pool4.run(run_whole, recipe(tmp_path, MUON, LAYOUTS["FSDP"], saving), 1)
    others = {
        SIGNS: f'optimizer.name = "{OWN}:SignMomentum": the checkpoint .* is of a run with "torch.optim:Muon"',
        MUON.replace("|lm_head", ""): "optimizer.param_groups = ",
    }
    for other, says in others.items():
        with pytest.raises(Exception, match=says):
            pool4.run(run_whole, recipe(tmp_path, other, LAYOUTS["FSDP"], saving), 2)


def kind(name: str, **arguments):
    made = getattr(custom_optimizers, name, None) or getattr(torch.optim, name)
    return optimizer_kind(made, FrozenDict(arguments))


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        *(("AdamW", 2), ("SGD", 0), ("RMSprop", 1), ("Adagrad", 1), ("Adadelta", 2), ("Adamax", 2), ("NAdam", 2)),
        *(("RAdam", 2), ("Rprop", 2), ("ASGD", 1), ("SignMomentum", 1)),
    ],
)
def test_elementwise_optimizers(name, copies):
    found = kind(name)
    assert set(found.needs) == {0, 1, 2, 3, 4, 5}
    assert {found.needs[dims] for dims in (1, 2, 3, 4, 5)} == {OptimizerNeeds(copies, whole=False)}


def test_others_need_whole_parameters():
    assert kind("Muon").needs == {2: OptimizerNeeds(1, whole=True)}
    assert "only supports 2D parameters" in kind("Muon").why[1]
    assert [kind("Adafactor").needs[dims] for dims in (1, 2)] == [OptimizerNeeds(1, True), OptimizerNeeds(0, True)]
    assert kind("RowNorms").needs[2] == OptimizerNeeds(0, whole=True)
    assert [kind("RowsOfLarge").needs[dims].whole for dims in (1, 2, 3)] == [True, True, True]
    assert [kind("FlatState").needs[dims] for dims in (1, 2)] == [OptimizerNeeds(1, False), OptimizerNeeds(0, True)]
    assert kind("SGD", momentum=0.9).needs[2] == OptimizerNeeds(1, whole=False)
    assert kind("AdamW", amsgrad=True, fused=True).needs[2] == OptimizerNeeds(3, whole=False)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("Noisy", {}, "it draws random numbers, which would be others on each rank"),
        ("Together", {}, "what it does to a parameter depends on other parameters"),
        ("Decays", {}, "or it changes parameters without a gradient"),
        ("CountsInGroups", {}, "it does not go on from a checkpoint as it would have without"),
        ("CountsByItself", {}, "it does not go on from a checkpoint as it would have without"),
        ("Remembers", {}, "it remembers parameters"),
        ("FixedRate", {}, "it does not read lr from its parameter groups"),
        ("History", {}, "it does not go on from a checkpoint as it would have without"),
        ("Late", {}, "it does not go on from a checkpoint as it would have without"),
        ("OneGroup", {}, "it makes other parameter groups than it is given"),
        ("AllHaveGradients", {}, "TypeError: add_(): argument 'other' (position 1) must be Tensor, not NoneType"),
        ("NoRate", {}, "got an unexpected keyword argument 'lr'"),
        ("Muon", {"momentun": 0.9}, "got an unexpected keyword argument 'momentun'"),
        ("Muon", {"momentum": -1.0}, "momentum should be >= 0 but is: -1.0"),
        ("LBFGS", {}, "missing 1 required positional argument: 'closure'"),
        ("SparseAdam", {}, "SparseAdam does not support dense gradients"),
    ],
)
def test_what_would_not_train_alike_everywhere_is_refused(name, arguments, says):
    with pytest.raises(RecipeError, match=re.escape(says)):
        kind(name, **arguments)


REFUSED = {
    "matrices alone": (
        '[optimizer]\nname = "torch.optim:Muon"',
        "optimizer.name = 'torch.optim:Muon' takes no parameters of 1 dim (ValueError: Muon only supports 2D",
    ),
    "convolutions": (
        MUON.replace("embed|", "token|"),
        "optimizer.name = 'torch.optim:Muon' takes no parameters of 4 dims (ValueError: Muon only supports 2D "
        "parameters whereas we found a parameter with size: torch.Size([4, 6, 16, 20])), as "
        "vision.embeddings.patch_embedding.weight; give them another one in [[optimizer.param_groups]]",
    ),
    "no module": (
        '[optimizer]\nname = "no_such:Class"',
        "optimizer.name = 'no_such:Class': cannot import it: No module",
    ),
    "no class": (f'[optimizer]\nname = "{OWN}:Nothing"', f"optimizer.name = '{OWN}:Nothing': cannot import it: module"),
    "no optimizer": (f'[optimizer]\nname = "{OWN}:NO_CLASS"', "it is no subclass of torch.optim.Optimizer"),
    "an unknown option": (
        f'[optimizer]\nname = "{OWN}:SignMomentum"\noptions = {{ powr = 1.0 }}',
        f"optimizer.name = '{OWN}:SignMomentum' with lr = 0.0008, weight_decay = 0.1, powr = 1.0: TypeError: ",
    ),
    "a rate twice": (
        f'[optimizer]\nname = "{OWN}:SignMomentum"\noptions = {{ lr = 1.0 }}',
        "optimizer.options.lr: write it in [optimizer]",
    ),
    "weight decay": (
        '[optimizer]\nname = "torch.optim:Rprop"\nweight_decay = 0.1',
        "optimizer.weight_decay: optimizer.name = 'torch.optim:Rprop' takes none; leave it out",
    ),
    "beta1": (
        f'[optimizer]\nname = "{OWN}:SignMomentum"\nbeta1 = 0.5',
        f"optimizer.beta1 = 0.5: optimizer.name = '{OWN}:SignMomentum' has no beta1; write what the class takes in",
    ),
    "implementation": (
        f'[optimizer]\nname = "{OWN}:SignMomentum"\nimplementation = "foreach"',
        f"optimizer.implementation = 'foreach': optimizer.name = '{OWN}:SignMomentum' has no implementation; write",
    ),
    "options of AdamW": (
        "[optimizer]\noptions = { eps = 1e-3 }",
        "optimizer.options.eps: write it in [optimizer]",
    ),
    "a group of nothing": (
        "[[optimizer.param_groups]]\npattern = 'nrom'\noptimizer_name = 'SGD'",
        "optimizer.param_groups[0].pattern = 'nrom': it matches the name of no parameter that is trained and that no "
        "table before it has; there are vision.",
    ),
    "a group of what another has": (
        "[[optimizer.param_groups]]\npattern = 'norm'\noptimizer_name = 'SGD'\n"
        "[[optimizer.param_groups]]\npattern = 'q_norm'\noptimizer_name = 'AdamW'",
        "optimizer.param_groups[1].pattern = 'q_norm': it matches the name of no parameter that is trained and that no",
    ),
    "arguments of a group": (
        "[[optimizer.param_groups]]\npattern = 'norm'\noptimizer_name = 'AdamW'\n"
        "optimizer_kwargs = { betas = [0.9, 2.0] }",
        "betas = [0.9, 2.0], eps = 1e-08, fused = True, foreach = False: ValueError: Invalid beta parameter at index 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_check_refuses(tmp_path, case):
    optimizer, says = REFUSED[case]
    with pytest.raises(RecipeError, match=re.escape(says)) as caught:
        resolve(recipe(tmp_path, optimizer, ALONE))
    assert "\n\n" not in str(caught.value)


def test_experts_do_not_move_under_an_optimizer_of_whole_parameters(tmp_path):
    layout = [ALONE[0], table("llm", "0-1", fsdp=2, expert_parallel_degree=2) + "\nexpert_placement_interval = 2"]
    given = recipe(tmp_path, ADAFACTOR, layout, experts=True, policy="sequential")
    with pytest.raises(RecipeError, match=r"parallelism\.llm\.expert_placement_interval = 2: optimizer\.name = 'torch"):
        resolve(parity_cases.packed(given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            '[optimizer]\nname = "Muon"',
            "optimizer.name = 'Muon': should be 'AdamW', 'Adam', 'SGD' or 'package.module:C",
        ),
        (
            "[[optimizer.param_groups]]\npattern = '('\noptimizer_name = 'SGD'",
            "optimizer.param_groups[0].pattern = '(': '(' is no regular expression: missing ), unterminated subpattern",
        ),
        ("[[optimizer.param_groups]]\npattern = 'x'", "optimizer.param_groups[0].optimizer_name is missing"),
        *(
            (
                "[[optimizer.param_groups]]\npattern = 'norm'\noptimizer_name = 'AdamW'\n"
                f"optimizer_kwargs = {{ {key} = {value} }}",
                f"{key} = {value} should be a number that is finite and not negative",
            )
            for key, value in (("lr", "-0.1"), ("lr", "nan"), ("lr", "'x'"), ("weight_decay", "inf"))
        ),
    ],
)
def test_a_table_that_is_not_right(tmp_path, given, says):
    with pytest.raises(RecipeError, match=re.escape(says)):
        recipe(tmp_path, given, ALONE)


def test_the_example_suits_the_digits():
    page = (ROOT / "src/hetmesh/training/README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    text = (ROOT / "recipes/digits.toml").read_text(encoding="utf-8")
    keys = resolve(parse_recipe({**tomli.loads(text), **tomli.loads(example)})).recipe.optimizer
    assert keys.names == ("torch.optim:Muon", "AdamW")


def test_arguments_come_from_the_nearest_table(tmp_path):
    given = recipe(tmp_path, MUON, ALONE, vision="lr = 0.5", llm="weight_decay = 0.25")
    keys = given.optimizer
    assert [group_of(keys, f"llm.{name}") for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")] == [
        0,
        -1,
    ]
    shared, vision, llm = (chosen_optimizer(given, name, -1).arguments for name in ("projector", "vision", "llm"))
    assert (shared["lr"], shared["weight_decay"], shared["momentum"]) == (0.03, 0.05, 0.8)
    assert (vision["lr"], vision["weight_decay"]) == (0.5, 0.05)
    assert (llm["lr"], llm["weight_decay"]) == (0.03, 0.25)
    group = chosen_optimizer(given, "vision", 0)
    assert (group.arguments["lr"], group.arguments["weight_decay"], group.arguments["eps"]) == (0.01, 0.05, 0.01)
    assert group.arguments["betas"] == (0.9, 0.95)


def test_what_optimizers_keep_is_counted(tmp_path):
    """Muon keeps one tensor for a matrix, AdamW two for all else."""
    resolved = resolve(recipe(tmp_path, MUON, [ALONE[0], table("llm", "0-1", tp=2)]))
    view = explain(resolved)
    assert view.optimizer == "torch.optim:Muon and AdamW"
    shape = resolved.shapes["vision"]
    assert shape is not None
    kept = {w.name: w.optimizer.copies for w in shape.weights}
    assert kept["embeddings.patch_embedding.weight"] == 2
    assert kept["encoder.layers.0.mlp.fc1.weight"] == 1
    (vision,) = (module for module in view.modules if module.name == "vision")
    assert vision.memory[0].optimizer == 8 * sum(w.numel * kept[w.name] for w in shape.weights)
