"""Modules after the LLM, and several losses: each loss, the total, gradients and parameters of one plain process."""

from functools import cache

import pytest

from hetmesh.boundary import World
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.testing import parity
from hetmesh.testing.parity import ParityError, compare, reference, run
from support import faults, tiny_vlms
from support.drawer_parts import FLOW
from support.often import some

READER = """
[modules.vision]
model = "siglip"
config = { hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2, patch_size = 4, intermediate_size = 12 }
[modules.projector]
model = "mlp"
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
"""
LLM = """
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = 16
num_hidden_layers = 3
num_attention_heads = 4
head_dim = 4
intermediate_size = 20
"""
DRAWER = FLOW.replace("image_out", "drawing")
POSE = """
[modules.pose]
model = "mlp"
config = { out_features = 3, hidden_features = 6 }
[modules.pose.loss]
kind = "mse"
unit = "frames"
weight = 0.3
[[boundaries]]
from = "llm"
to = "pose"
at = "pose"
layer = "model.layers.1"
"""
DATA = """
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
text_only = 0.3
without_targets = 0.2
kinds = { image = [1, 8, 8], drawing = [1, 8, 8], pose = [2, 3] }
[training]
dtype = "float64"
local_batch_size = 4
"""
DRAWS = READER + LLM + DRAWER + DATA.replace(", pose = [2, 3]", "")
BOTH = READER + LLM + DRAWER + POSE + DATA
STEPS = 3


def layout(**tables):
    """The tables of `[parallelism]`: `llm=dict(ranks=[0, 1], tp=2)`."""
    keys = {"tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree"}
    keys |= {"fsdp": "data_parallel_shard_degree", "sp": "enable_sequence_parallel"}
    keys |= {"schedule": "pipeline_parallel_schedule", "size": "pipeline_parallel_microbatch_size"}
    lines = []
    for name, table in tables.items():
        lines.append(f"[parallelism.{name}]")
        values = {keys.get(key, key): value for key, value in table.items()}
        lines += [f"{key} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for key, v in values.items()]
    return "\n".join(["", *lines, ""])


def on_this_rank(rank, recipe, fault=None):
    return run(recipe, World.current(), steps=STEPS, fault=fault)


def check(pool, text, fault=None):
    recipe = parse_recipe(text)
    return compare(reference(recipe, STEPS), pool.run(on_this_rank, recipe, fault, timeout=120), 1e-10)


SCHEDULES = ("1F1B", "Interleaved1F1B", "zero_bubble", "three_phase", "bubble_fill")
CASES = {
    "all on one rank": (DRAWS, layout(llm={"ranks": [0], "size": 2})),
    "generator without a table": (DRAWS, layout(llm={"ranks": [0, 1], "tp": 2, "size": 2})),
    "other ranks": (DRAWS, layout(llm={"ranks": [0, 1], "tp": 2, "size": 2}, drawer={"ranks": [2, 3]})),
    "overlapping ranks": (
        BOTH,
        layout(llm={"ranks": [0, 1, 2], "size": 1}, drawer={"ranks": [1, 3]}, pose={"ranks": [2, 1, 3]}),
    ),
    "colocated, other degrees": (
        BOTH,
        layout(llm={"ranks": [0, 1, 2, 3], "tp": 2, "sp": True, "size": 2}, drawer={"ranks": [0, 1, 2, 3]}),
    ),
    "context parallel, packed": (
        BOTH,
        layout(
            llm={"ranks": [0, 1], "cp": 2, "size": 2},
            drawer={"ranks": [3, 1], "fsdp": 2},
            pose={
                "ranks": [2],
            },
        ),
    ),
    "generator tensor parallel": (DRAWS, layout(llm={"ranks": [0, 1], "size": 2}, drawer={"ranks": [2, 3], "tp": 2})),
    "generator in stages": (
        DRAWS,
        layout(llm={"ranks": [0, 1], "size": 1, "schedule": "1F1B"}, drawer={"ranks": [2, 3], "pp": 2}),
    ),
    **{
        f"pipeline, {schedule}": (
            BOTH,
            layout(
                vision={"ranks": [0, 1]},
                llm={"ranks": [0, 1], "pp": 2, "size": 1, "schedule": schedule},
                drawer={"ranks": [0, 1]},
                pose={"ranks": [2, 3]},
            ),
        )
        for schedule in SCHEDULES
    },
}


def changed(text, *changes):
    """`text` with each (old, new) replaced, of which every `old` is there."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def keys(name, lines):
    """A change that gives module `name` further keys."""
    return f"[modules.{name}]\n", f"[modules.{name}]\n{lines}\n"


FROZEN = "trainable = false"
LORA = "lora = { rank = 2 }"
FULL = '[activation_checkpoint]\nmode = "full"\n'
PACKED = ("[training]\n", "[training]\npack_samples = true\n")
FEW = (
    ("text_only = 0.3\nwithout_targets = 0.2", "text_only = 0.7\nwithout_targets = 0.6\nseed = 7"),
    ("size = 4\n", "size = 2\n"),
)
"""Samples of which few have anything, two per lane."""
AUTOENCODER = """
[modules.autoencoder]
model = "siglip"
config = { hidden_size = 6, num_hidden_layers = 2, num_attention_heads = 2, patch_size = 4, intermediate_size = 8 }
[[boundaries]]
from = "autoencoder"
to = "drawer"
"""
"""Its rows, four per image, are what the flow makes."""
LATENTS = changed(DRAWS, ("patch_size = 4\n[modules.drawer.loss]", "[modules.drawer.loss]")) + AUTOENCODER
ALSO_READ = """
[modules.widen]
model = "mlp"
[[boundaries]]
from = "autoencoder"
to = "widen"
[[boundaries]]
from = "widen"
to = "llm"
at = "drawing"
"""
"""The same rows replace the placeholders of the images, in place of learned queries."""
EDITS = changed(LATENTS, ("queries = 3", "queries = 4")) + ALSO_READ
CONNECTED = changed(
    DRAWS,
    (
        'from = "llm"\nto = "drawer"\nat = "drawing"\n',
        'from = "llm"\nto = "connector"\nat = "drawing"\n[[boundaries]]\nfrom = "connector"\nto = "drawer"\n',
    ),
    ("[modules.drawer]\n", '[modules.connector]\nmodel = "mlp"\nconfig = { out_features = 10 }\n[modules.drawer]\n'),
)
SUPERVISED = changed(
    BOTH,
    (
        "[modules.projector]\n",
        '[modules.vision.loss]\nkind = "support.losses:squares"\nunit = "items"\nweight = 0.2\n[modules.projector]\n',
    ),
)
"""An encoder with a loss of its own."""
EXPERTS = changed(
    DRAWS,
    PACKED,
    ('model = "qwen3"', 'model = "qwen3_moe"'),
    (
        "intermediate_size = 20",
        "intermediate_size = 20\nmoe_intermediate_size = 6\nnum_experts = 4\nnum_experts_per_tok = 2\n"
        "norm_topk_prob = true\nrouter_aux_loss_coef = 0.5",
    ),
)
TWO_AND_TWO = {"llm": {"ranks": [0, 1], "tp": 2, "size": 2}, "drawer": {"ranks": [2, 3]}}
CASES |= {
    "frozen llm": (
        changed(BOTH, keys("llm", FROZEN)),
        layout(
            vision={"ranks": [3, 2]},
            llm={"ranks": [0, 1], "pp": 2, "size": 2, "schedule": "1F1B"},
            drawer={"ranks": [1, 2], "fsdp": 2},
            pose={"ranks": [0]},
        ),
    ),
    "frozen generators": (
        changed(BOTH, keys("drawer", FROZEN), keys("pose", FROZEN)),
        layout(**TWO_AND_TWO, pose={"ranks": [1, 2]}),
    ),
    "generator alone is trained": (
        changed(DRAWS, keys("llm", FROZEN), keys("vision", FROZEN), keys("projector", FROZEN)),
        layout(**TWO_AND_TWO),
    ),
    "adapters": (
        changed(DRAWS, keys("llm", LORA), keys("drawer", LORA)),
        layout(**TWO_AND_TWO | {"drawer": {"ranks": [2, 3], "tp": 2}}),
    ),
    "targets of a frozen encoder": (
        changed(LATENTS, keys("autoencoder", FROZEN)),
        layout(**TWO_AND_TWO, autoencoder={"ranks": [0, 1]}),
    ),
    "targets of a trained encoder": (LATENTS, layout(**TWO_AND_TWO, autoencoder={"ranks": [3, 0], "tp": 2})),
    "an encoder of both": (
        EDITS,
        layout(
            llm={"ranks": [0, 1], "tp": 2, "sp": True, "size": 2},
            drawer={"ranks": [2, 3], "tp": 2},
            autoencoder={"ranks": [1, 2, 3]},
        ),
    ),
    "an encoder of both, in stages": (
        EDITS,
        layout(
            llm={"ranks": [0, 1], "pp": 2, "size": 1, "schedule": "zero_bubble"},
            drawer={"ranks": [2, 3], "pp": 2},
            autoencoder={"ranks": [0, 1]},
        ),
    ),
    "encoder and generator share a mesh": (
        BOTH,
        layout(
            llm={"ranks": [0, 1], "cp": 2, "size": 2},
            vision={"ranks": [2, 3]},
            drawer={"ranks": [2, 3]},
            pose={"ranks": [2, 3]},
        ),
    ),
    "a connector": (
        CONNECTED,
        layout(
            llm={"ranks": [0, 1], "tp": 2, "size": 2}, connector={"ranks": [1, 2], "tp": 2}, drawer={"ranks": [0, 3]}
        ),
    ),
    "a connector in the LLM's stages": (
        CONNECTED,
        layout(llm={"ranks": [0, 1], "pp": 2, "size": 1, "schedule": "1F1B"}),
    ),
    "packed": (
        changed(BOTH, PACKED),
        layout(llm={"ranks": [0, 1], "tp": 2, "sp": True, "size": 2}, drawer={"ranks": [2, 3]}, pose={"ranks": [1, 2]}),
    ),
    "batches without targets": (
        changed(BOTH, *FEW),
        layout(llm={"ranks": [0, 1], "size": 1}, drawer={"ranks": [2, 3]}, pose={"ranks": [3]}),
    ),
    "batches without targets, in stages": (
        changed(BOTH, *FEW),
        layout(
            llm={"ranks": [0, 1], "pp": 2, "size": 1, "schedule": "1F1B"},
            drawer={"ranks": [2, 3], "fsdp": 2},
            pose={"ranks": [0]},
        ),
    ),
    "computed again": (
        BOTH + FULL,
        layout(
            llm={"ranks": [0, 1], "pp": 2, "size": 1, "schedule": "1F1B"},
            drawer={"ranks": [2, 3], "tp": 2},
            pose={"ranks": [0]},
        ),
    ),
    "an encoder with a loss": (SUPERVISED, layout(vision={"ranks": [2, 3, 1]}, **TWO_AND_TWO)),
    "an encoder with a loss, in gaps": (
        SUPERVISED,
        layout(
            vision={"ranks": [0, 1]},
            llm={"ranks": [0, 1], "pp": 2, "size": 1, "schedule": "bubble_fill"},
            drawer={"ranks": [0, 1]},
        ),
    ),
    **{
        f"deferred{how}": (
            changed(EDITS, ("drawing = [1, 8, 8] }", "drawing = [1, 8, 8], pose = [2, 3] }")) + POSE,
            f'[balance]\npolicy = "entrain"\ndeferral = true\nsplit_deferred_backward = {str(bool(how)).lower()}\n',
            layout(
                vision={"ranks": [2, 3]},
                llm={"ranks": [0, 1], "size": 1},
                drawer={"ranks": [2, 1]},
                pose={"ranks": [3]},
                autoencoder={"ranks": [3, 0]},
            ),
        )
        for how in ("", ", backward split")
    },
    "experts": (
        EXPERTS,
        layout(llm={"ranks": [0, 1], "fsdp": 2, "expert_parallel_degree": 2, "size": 2}, drawer={"ranks": [2, 3]}),
    ),
}

OFTEN = (
    "context parallel, packed",
    "an encoder of both, in stages",
    "batches without targets, in stages",
)
"""The fullest; the others are exhaustive."""


@pytest.mark.slow
@pytest.mark.parametrize("case", some(OFTEN, CASES))
def test_modules_after_the_llm_equal_one_process(pool4, case):
    check(pool4, "".join(CASES[case]))


FAULTY = DRAWS + layout(llm={"ranks": [0, 1, 2, 3], "tp": 2, "size": 2}, drawer={"ranks": [1, 2]})
"""A generator of two lanes, each of which has several microbatches."""
FAULTS = {
    "loss divided per microbatch": faults.DividePerMicrobatch("drawer"),
    "gradient of a lane dropped": faults.DropReplica("drawer", 1),
    "rows one token late": faults.TokenLate("drawing"),
    "weight applied twice": faults.WeighTwice("drawer"),
    "noise by place": faults.DrawByPlace(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(("gradient of a lane dropped", "rows one token late"), FAULTS))
def test_faults_of_modules_after_the_llm_are_found(pool4, name):
    ranks = pool4.run(on_this_rank, parse_recipe(FAULTY), FAULTS[name], timeout=120)
    with pytest.raises(ParityError, match="quantities differ by more than 1e-10: gradient"):
        compare(truth_of_faulty(), ranks, 1e-10)


@cache
def truth_of_faulty():
    return reference(parse_recipe(FAULTY), STEPS)


@pytest.mark.slow
def test_the_recipe_of_faults_is_right_without_them(pool4):
    compare(truth_of_faulty(), pool4.run(on_this_rank, parse_recipe(FAULTY), timeout=120), 1e-10)


def test_batches_without_targets_are_among_the_cases():
    recipe = parse_recipe("".join(CASES["batches without targets"]))
    of_steps = reference(recipe, STEPS).of_modules
    assert any(not loss for losses in of_steps for loss in losses.values())
    assert all(any(losses[name] for losses in of_steps) for name in ("llm", "drawer", "pose"))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_dropout_drew_is_drawn_again_where_an_encoder_with_a_loss_computes_again(pool4):
    dropped = changed(SUPERVISED, keys("vision", "lora = { rank = 2, dropout = 0.25 }"))
    text = dropped + layout(
        vision={"ranks": [2]},
        llm={"ranks": [0, 1], "pp": 2, "size": 2, "schedule": "three_phase", "three_phase_recompute": True},
        drawer={"ranks": [3]},
        pose={"ranks": [3]},
    )
    parity.check(pool4, parse_recipe(text + '[balance]\npolicy = "none"\n'), STEPS, microbatches=True)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_a_generator_after_the_llm_of_a_directory(pool4, tmp_path, name):
    boundary = '[[boundaries]]\nfrom = "vision"\nto = "llm"\nat = "image"\n'
    kinds = "kinds = { image = [3, 8, 8], drawing = [1, 8, 8] }, without_targets = 0.2"
    text = tiny_vlms.recipe_text(tiny_vlms.save(name, tmp_path), boundary + DRAWER, kinds)
    tables = layout(llm={"ranks": [0, 1], "pp": 2, "size": 1, "schedule": "1F1B"}, drawer={"ranks": [2, 3], "tp": 2})
    parity.check(pool4, parse_recipe(changed(text, ("local_batch_size = 2\n", "local_batch_size = 4\n")) + tables))
