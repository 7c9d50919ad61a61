"""Modules after the LLM: what check says and refuses, and what is known of their costs."""

import re
from pathlib import Path

import pytest

from hetmesh.cost.work import Work, sample_work
from hetmesh.data.drawn import describe_without_targets
from hetmesh.errors import RecipeError
from hetmesh.graph import SampleMeta
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.report.balance_view import balance_view
from hetmesh.resolve.directories import up_to_llm
from hetmesh.resolve.resolved import check_first_batch, resolve
from hetmesh.resolve.summary import summary
from support import drawer_parts as parts

DRAW = Path(__file__).parents[2] / "recipes" / "digits_draw.toml"
PARALLEL = "--parallelism.pipeline_parallel_schedule=bubble_fill", "--parallelism.drawer.ranks=0-1"
REFUSED = {
    "slices in collectives": (
        (*PARALLEL, "--parallelism.bubble_fill_in_collectives=true"),
        r"bubble_fill_in_collectives = True: drawer: no kernels of modules after the LLM run in its collectives",
    ),
    "gaps without anybody": (
        (*PARALLEL, "--parallelism.drawer.ranks=2-3", "--parallelism.vision.ranks=2-3"),
        r"no encoder, nor a module after the LLM, shares ranks with 'llm'",
    ),
    "microbatches of its own": (
        ("--balance.microbatch_sizes.drawer=1",),
        r"balance.microbatch_sizes.drawer: a module after the LLM has its microbatches",
    ),
    "shares of microbatches": (
        ("--balance.microbatch_shares.drawer=[1, 3]",),
        r"balance.microbatch_shares.drawer: a module after the LLM has its microbatches",
    ),
    "context parallel": (
        ("--parallelism.drawer.context_parallel_degree=2", "--parallelism.drawer.data_parallel_replicate_degree=1"),
        r"parallelism.drawer.context_parallel_degree = 2: of the modules only 'llm'",
    ),
    "sequence parallel": (
        (
            *("--parallelism.drawer.tensor_parallel_degree=2", "--parallelism.drawer.enable_sequence_parallel=true"),
            "--parallelism.drawer.data_parallel_replicate_degree=1",
        ),
        r"parallelism.drawer.enable_sequence_parallel: this flow cannot split its tokens",
    ),
    "placeholder that no sample has": (
        ("--data.options.draw=0",),
        r"boundaries\[2\].at = 'image_out': data source 'digits' has the placeholders \['image'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_modules_after_the_llm_cannot_do_is_refused_by_name(case):
    overrides, says = REFUSED[case]
    with pytest.raises(RecipeError, match=says):
        resolve(load_recipe(DRAW, overrides))


LOSS = '[modules.drawer.loss] # added to the LLM\'s cross-entropy\nkind = "flow_matching"'
AFTER = '[[boundaries]]\nfrom = "llm"\nto = "drawer"\nat = "image_out"'
CONNECTED = f'[modules.connector]\nmodel = "mlp"\n{AFTER.replace("drawer", "connector")}\n[[boundaries]]\n'
CONNECTED += 'from = "connector"\nto = "drawer"'
ENCODER = "config = { hidden_size = 4, num_hidden_layers = 1, num_attention_heads = 1, patch_size = 4 }"
AUTOENCODER = f'[modules.encoder]\nmodel = "siglip"\n{ENCODER}\n[[boundaries]]\nfrom = "encoder"\nto = "drawer"'
NO_LOSS = r"modules\.drawer\.loss is missing: .* its own; 'llm' is the LLM, to which rows with `at` go, or from w.*"
MISTAKES = {
    "no loss": (LOSS, "#", NO_LOSS),
    "no loss behind a connector": (f"{LOSS}|{AFTER}", f"#|{CONNECTED}", NO_LOSS),
    "no loss beside an encoder": (f"{LOSS}|{AFTER}", f"#|{AFTER}\n{AUTOENCODER}", NO_LOSS),
    "the LLM's loss": (
        '"flow_matching"',
        '"cross_entropy"',
        r"modules\.drawer\.loss\.kind = 'cross_entropy': only 'llm', the LLM, has target tokens; others count .*",
    ),
    "items of the LLM": (
        LOSS,
        f'[modules.llm.loss]\nkind = "a:b"\nunit = "items"\n{LOSS}',
        r"modules\.llm\.loss\.unit = 'items': 'llm', the LLM, has target tokens; write 'tokens'",
    ),
    "targets of other items": (
        AFTER,
        f'{AFTER}\n[[boundaries]]\nfrom = "vision"\nto = "drawer"',
        r"modules\.vision\.media: 'vision' reads 'image', and its rows are the targets of 'drawer', which makes 'ima.*",
    ),
    "a loss of a connector": (
        AFTER,
        CONNECTED.replace('"mlp"', '"mlp"\nconfig = { out_features = 6 }\nloss = { kind = "mse" }'),
        r"modules\.connector\.loss: 'connector' hands its rows on to 'drawer'; after 'llm' only .*",
    ),
    "no at": (
        'at = "image_out"',
        "",
        r"boundaries\[2\]\.at is missing: name the placeholder of the tokens whose hidden states 'drawer' reads, .*",
    ),
    "at of nothing": (
        'at = "image_out"',
        'at = "image_uot"',
        r"boundaries\[2\]\.at = 'image_uot': data source 'digits' has the placeholders \['image', 'image_out'\]",
    ),
    "no such layer": (
        AFTER,
        AFTER + '\nlayer = "layers.1"',
        r"boundaries\[2\]\.layer = 'layers.1': of 'llm' hidden states behind model.layers.0 to model.norm can be .*",
    ),
    "at twice": (
        AFTER,
        CONNECTED + '\nat = "image_out"',
        r"boundaries\[3\]\.at: rows replace placeholders only in 'llm', but connector->drawer ends elsewhere; leave .*",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_is_one_line_that_names_its_key(mistake):
    old, new, says = MISTAKES[mistake]
    text = DRAW.read_text().replace("weight = 1.0", "#")
    for before, after in zip(old.split("|"), new.split("|"), strict=True):
        assert before in text
        text = text.replace(before, after)
    with pytest.raises(RecipeError) as caught:
        resolve(parse_recipe(text))
    assert re.fullmatch(says, str(caught.value)), caught.value


def test_items_that_seq_len_cuts_are_told_with_the_key():
    resolved = resolve(load_recipe(DRAW, ("--modules.drawer.config.queries=400",)))
    drawn = resolved.loader().batch(0)
    places = [i for i in range(len(drawn)) if not drawn.given.num_targets[i]]
    assert f"(training.seq_len = 128 cuts the media of {len(places)})" in describe_without_targets(drawn, places, 128)
    assert check_first_batch(resolved) == [
        "modules.drawer.loss: the first batch has none of the latents that it counts; training.seq_len = 128 may cut "
        "them"
    ]


def test_an_encoder_in_the_place_of_the_llm_is_told_what_put_it_there():
    text = parts.LLM.replace("image_out = [1, 8, 8]", "image = [1, 8, 8], image_out = [1, 8, 8]")
    seen = f'[modules.vision]\nmodel = "siglip"\n{ENCODER}\n[[boundaries]]\nfrom = "vision"\nto = "llm"\nat = "image"'
    with pytest.raises(RecipeError, match=r"modules\.vision: siglip reads media, .* does the boundary out of the LLM"):
        resolve(parse_recipe("\n".join([text, seen, parts.FLOW.replace('at = "image_out"', "")])))


@pytest.mark.parametrize(("weights", "left"), [((1, 0), ["drawer"]), ((0, 1), []), ((1, 1), [])])
def test_a_module_that_only_weight_decay_would_change_is_told(weights, left):
    llm = f"--modules.llm.loss={{kind = 'cross_entropy', weight = {weights[0]}}}"
    resolved = resolve(load_recipe(DRAW, (llm, f"--modules.drawer.loss.weight={weights[1]}")))
    assert [note.split(":")[0] for note in resolved.notes] == [f"modules.{name}" for name in left]
    frozen = ("--modules.drawer.trainable=false", f"--modules.drawer.loss.weight={weights[1]}")
    assert not resolve(load_recipe(DRAW, (llm, *frozen))).notes


def test_the_summary_says_what_is_added_up():
    lines = [*summary(resolve(load_recipe(DRAW, ("--modules.drawer.loss.weight=0.5",))))]
    flow = "0.5 x flow_matching of drawer per row of targets"
    assert f"  loss: 1 x cross_entropy of llm per target token + {flow}" in lines


def test_a_generator_is_no_llm_and_works_on_what_goes_through_its_blocks():
    resolved = resolve(load_recipe(DRAW))
    layers = {layer.name: layer for layer in resolved.shapes["drawer"].layers}
    block = layers["blocks.0"]
    assert block.attention_width == 64
    assert not any(layer.causal or layer.on_targets for layer in layers.values())
    assert [weight.name for weight in block.weights if weight.per_row == 0 and weight.name.endswith("weight")] == [
        "blocks.0.modulation.weight"  # of each image's time
    ]
    meta = next(meta for batch in range(9) for meta in resolved.loader().batch(batch).metas if meta.rows["drawer"])
    assert isinstance(meta, SampleMeta)
    assert sample_work(resolved.graph, "drawer", meta) == Work(8, 64)  # four tokens and four patches
    assert meta.rows["llm.image_out"] == 4


def test_lengths_of_a_file_do_not_say_what_modules_after_the_llm_read(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"vision": 4, "llm": 20}\n')
    with pytest.raises(RecipeError, match="the recipe has drawer"):
        balance_view(resolve(load_recipe(DRAW)), lengths=str(file))


def test_what_is_compared_with_a_directory_has_an_llm_whose_loss_is_only_measured():
    weight = '--modules.llm.loss={kind = "cross_entropy", weight = 0.0}'
    assert up_to_llm(load_recipe(DRAW, [weight])).llm == "llm"
