"""Recipes: what parses, with which values, and one clear error for each kind of bad recipe."""

import pickle
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

import hetmesh.context
import hetmesh.schedule
from hetmesh.errors import RecipeError
from hetmesh.recipe.keys import SECTIONS, valid_keys
from hetmesh.recipe.recipe import Recipe, load_recipe, parse_recipe

DESIGN = """
[job]
description = "digits: encoder on ranks 0-1, LLM on ranks 2-3"
dump_folder = "./outputs/digits"

[modules.vision]
model = "siglip"
config = { hidden_size = 64, num_hidden_layers = 2 }
[modules.projector]
model = "mlp"
[modules.llm]
model = "qwen3"
lr = 2e-3

[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"

[parallelism.vision]
ranks = [0, 1]
data_parallel_replicate_degree = 2
[parallelism.llm]
ranks = [2, 3]
tensor_parallel_degree = 2

[data]
source = "digits"
[training]
local_batch_size = 64
steps = 800
[validation]
freq = 100
"""

SCHEDULES, ASSIGNMENTS, MASKS = (
    (hetmesh.schedule, "POLICIES"),
    (hetmesh.context, "POLICIES"),
    (hetmesh.context.masks, "MASKS"),
)
ONE_MODULE = '[modules.llm]\nmodel = "qwen3"\n'


def test_the_example_of_the_design_parses():
    recipe = parse_recipe(DESIGN)
    assert recipe.modules["llm"].lr == 2e-3
    assert recipe.modules["vision"].config == {"hidden_size": 64, "num_hidden_layers": 2}
    assert (recipe.llm, recipe.world_size, recipe.lanes, recipe.schedule) == ("llm", 4, 1, "sequential")
    assert recipe.wiring.media == {"vision": "image", "projector": None, "llm": None}
    assert (recipe.training.steps, recipe.optimizer.name, recipe.debug.seed) == (800, "AdamW", 0)


def test_a_recipe_is_a_value():
    recipe = parse_recipe(DESIGN)
    assert recipe == parse_recipe(DESIGN)
    assert hash(recipe) == hash(parse_recipe(DESIGN))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe != parse_recipe(DESIGN, ("--training.steps", "1"))
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.steps = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="frozen"):
        recipe.modules["vision"].frozen_config["hidden_size"] = 1  # type: ignore[index]


def test_config_tables_are_copies_that_libraries_may_change():
    recipe = parse_recipe(DESIGN, ("--modules.llm.config.rope_parameters", "{ types = ['a'] }"))
    config = recipe.modules["llm"].config
    config["rope_parameters"]["types"].append("b")
    assert recipe.modules["llm"].config == {"rope_parameters": {"types": ["a"]}}
    assert hash(recipe)


@pytest.mark.parametrize(
    ("overrides", "read", "expected"),
    [
        (("--training.steps", "20"), lambda r: r.training.steps, 20),
        (("--training.steps=20",), lambda r: r.training.steps, 20),
        (("--modules.llm.lr", "1e-3"), lambda r: r.modules["llm"].lr, 1e-3),
        (("--optimizer.lr", "1"), lambda r: r.optimizer.lr, 1.0),
        (("--parallelism.vision.ranks", "0-1"), lambda r: r.wiring.meshes["vision"].ranks, (0, 1)),
        (("--parallelism.vision.ranks=[1, 0]",), lambda r: r.wiring.meshes["vision"].ranks, (1, 0)),
        (("--job.dump_folder", "/tmp/a b"), lambda r: r.job.dump_folder, "/tmp/a b"),
        (("--job.dump_folder", '"7"'), lambda r: r.job.dump_folder, "7"),
        (("--checkpoint.enable", "true"), lambda r: r.checkpoint.enable, True),
        (("--modules.vision.config.hidden_size", "32"), lambda r: r.modules["vision"].config["hidden_size"], 32),
        (("--data.options.size", "32"), lambda r: r.data.options, {"size": 32}),
        (("--boundaries.1.at", "photo"), lambda r: r.wiring.media["vision"], "photo"),
        (("--training.steps", "2", "--training.steps", "3"), lambda r: r.training.steps, 3),
        (("--training.global_batch_size=-1",), lambda r: r.batch.global_batch_size, 64),
    ],
)
def test_overrides(overrides, read, expected):
    assert read(parse_recipe(DESIGN, overrides)) == expected


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("--training.stpes", "20"),
            "training.stpes: unknown key 'stpes'; did you mean 'steps'? Valid are: local_batch",
        ),
        (
            ("--trainig.steps", "20"),
            "[trainig]: unknown table 'trainig'; did you mean 'training'? Valid are: job, model, modules",
        ),
        (("--modules.lm.lr", "1"), "--modules.lm.lr: unknown module 'lm'; did you mean 'llm'? Valid are: vision, "),
        (("--parallelism.lm.ranks", "1"), "parallelism.lm: unknown module 'lm'; did you mean 'llm'?"),
        (("--training.steps",), "override '--training.steps': give it a value: --training.steps VALUE"),
        (("--training.steps", "--debug.seed", "1"), "give it a value"),
        (("training.steps", "20"), "override 'training.steps': write overrides as --section.key value"),
        (("--steps", "20"), "override '--steps': write overrides as --section.key value"),
        (("--training.steps.x", "20"), "which is a value and not"),
        (("--boundaries.2.at", "image"), "--boundaries.2.at: '2' is no index into an array of 2; write 0..1"),
        (("--training.steps", "many"), "training.steps = 'many': should be a valid integer"),
        (("--checkpoint.folder", "/shared"), "checkpoint.folder = '/shared': '/shared' must lie in job.dump_folder"),
        (("--checkpoint.folder", "../other"), "'../other' must lie in job.dump_folder: a name, or a path without '..'"),
    ],
)
def test_bad_overrides(overrides, says):
    with pytest.raises(RecipeError, match=re.escape(says)):
        parse_recipe(DESIGN, overrides)


BAD: dict[str, tuple[str, str, str]] = {
    # what is wrong: (text to replace in DESIGN, by what, what the error must say)
    "unknown key": (
        "steps =",
        "stpes =",
        "training.stpes: unknown key 'stpes'; did you mean 'steps'? Valid are: local_",
    ),
    "unknown key without a near one": (
        "steps =",
        "qqq =",
        "training.qqq: unknown key 'qqq'. Valid are: local_batch_size",
    ),
    "unknown key of a module": ("lr =", "learning =", "modules.llm.learning: unknown key 'learning'"),
    "unknown key of a boundary": (
        "at =",
        "att =",
        "boundaries[1].att: unknown key 'att'; did you mean 'at'? Valid are: from,",
    ),
    "unknown key of a layout": (
        "ranks = [0",
        "rank = [0",
        "parallelism.vision.rank: unknown key 'rank'; did you mean 'ranks'?",
    ),
    "unknown table": (
        "[data]",
        "[date]",
        "[date]: unknown table 'date'; did you mean 'data'? Valid are: job, model, modules",
    ),
    "torchtitan's table": (
        "[data]",
        "[fault_tolerance]\nenable = true\n[data]",
        "fault_tolerance.enable = True: of torchtitan's values hetmesh has only False; leave it out; a run that",
    ),
    "torchtitan's model table": (
        "[data]",
        '[model]\nname = "llama3"\n[data]',
        "model.name = 'llama3': a key of torchtitan's that hetmesh does not have; describe each module in [modules.",
    ),
    "torchtitan's key": (
        "steps =",
        'dataset = "c4"\nsteps =',
        "training.dataset = 'c4': a key of torchtitan's that hetmesh does not have; write [data] source and",
    ),
    "experts that nothing holds": (
        "tensor_parallel_degree = 2",
        "tensor_parallel_degree = 2\nexpert_parallel_degree = 2",
        "parallelism.llm.expert_parallel_degree = 2: it is taken out of data_parallel_replicate_degree, as "
        "data_parallel_shard_degree is 1, and must divide that: 1; valid are [1]",
    ),
    "freezing": ("lr = 2e-3", "trainable = 0", "modules.llm.trainable = 0: should be true, false, or a list"),
    "freezing by name": (
        "lr = 2e-3",
        "trainable = ['norm', '!(']",
        "modules.llm.trainable = ('norm', '!('): '(' is no regular expression: missing ), unterminated subpattern",
    ),
    "freezing by no name": ("lr = 2e-3", "trainable = []", "modules.llm.trainable = (): should be true, false, or a"),
    "a key with another home": (
        "steps =",
        "seed = 1\nsteps =",
        "training.seed: hetmesh has no such key; write [debug] seed",
    ),
    "wrong type": ("steps = 800", 'steps = "800"', "training.steps = '800': should be a valid integer"),
    "wrong type, float": ("steps = 800", "steps = 8.5", "training.steps = 8.5: should be a valid integer"),
    "wrong type, bool": ("freq = 100", "freq = true", "validation.freq = True: should be a valid integer"),
    "not an array": ("[data]", "[elastic]\nlayouts = 'x'\n[data]", "elastic.layouts = 'x': should be an array"),
    "not a table": ("[data]\nsource", "[job.x]\nsource", "job.x: unknown key 'x'"),
    "out of range": ("steps = 800", "steps = 0", "training.steps = 0: should be greater than or equal to 1"),
    "no such choice": (
        "steps =",
        'dtype = "int8"\nsteps =',
        "training.dtype = 'int8': should be 'float32', 'float64' or 'bfloat16'",
    ),
    "missing model": ('model = "mlp"', "", "modules.projector.model is missing"),
    "missing from": ('from = "vision"', "", "boundaries[0].from is missing"),
    "bad plan": ("lr = 2e-3", 'plan = { a = "row" }', "modules.llm.plan.a = 'row': should be 'colwise', 'rowwise'"),
    "rank repeated": ("[0, 1]", "[0, 0]", "parallelism.vision.ranks = (0, 0): rank 0 is given more than once"),
    "rank negative": (
        "[0, 1]",
        "[-1, 0]",
        "parallelism.vision.ranks = (-1, 0): ranks must be one or more numbers >= 0",
    ),
    "no ranks": ("[0, 1]", "[]", "parallelism.vision.ranks = (): ranks must be one or more numbers >= 0"),
    "bad rank text": (
        "[0, 1]",
        '"0..1"',
        "parallelism.vision.ranks = '0..1': '0..1' is no rank; write ranks as [0, 1]",
    ),
    "rank range without end": ("[0, 1]", '"0-99999999999"', "'0-99999999999' is no rank"),
    "rank range backwards": ("[0, 1]", '"3-2"', "'3-2' is no rank"),
    "degrees do not multiply": (
        "data_parallel_replicate_degree = 2",
        "data_parallel_replicate_degree = 3",
        "parallelism.vision: the degrees (data_parallel_replicate_degree 3: 3 together) must multiply to its number of "
        "ranks, 2 (ranks 0,1); its divisors are [1, 2]",
    ),
    "degree does not divide": (
        "tensor_parallel_degree = 2",
        "tensor_parallel_degree = 3",
        "parallelism.llm: the degrees (tensor_parallel_degree 3: 3 together) must divide its number of ranks, 2",
    ),
    "boundary from nowhere": (
        'from = "vision"',
        'from = "audio"',
        "boundaries: boundary audio->projector: there is no module",
    ),
    "two sinks": (
        'from = "projector"\nto = "llm"\nat = "image"',
        'from="vision"\nto="llm"\nat="image"',
        "modules.projector.loss is missing: no module reads what 'projector' computes, so it needs a loss of its own; "
        "'llm' is the LLM, to which rows with `at` go",
    ),
    "cycle": (
        "[parallelism.vision]",
        '[[boundaries]]\nfrom = "projector"\nto = "vision"\n[parallelism.vision]',
        "boundaries form a cycle among ['llm', 'projector', 'vision']",
    ),
    "at missing": (
        'at = "image"',
        "",
        "boundaries[1].at is missing: name the placeholder that the rows of projector->llm",
    ),
    "a module after the LLM": (
        "[parallelism.vision]",
        '[[boundaries]]\nfrom = "llm"\nto = "head"\n[modules.head]\nmodel = "mlp"\n[parallelism.vision]',
        "boundaries[2].at is missing: name the placeholder of the tokens whose hidden states 'head' reads",
    ),
    "a key of a loss": (
        "[parallelism.vision]",
        '[modules.llm.loss]\nkind = "cross_entropy"\nweigth = 0.5\n[parallelism.vision]',
        "modules.llm.loss.weigth: unknown key 'weigth'; did you mean 'weight'? Valid are: kind, weight, unit",
    ),
    "no weight": (
        "[parallelism.vision]",
        '[modules.llm.loss]\nkind = "cross_entropy"\nweight = 0.0\n[parallelism.vision]',
        "modules.llm.loss.weight = 0: no loss trains anything; give one of them a weight above 0",
    ),
    "at misplaced": (
        'to = "projector"',
        'to = "projector"\nat = "image"',
        "'projector' is the LLM, to which rows with `at` go, or from which they come",
    ),
    "at twice": (
        "[parallelism.vision]",
        '[modules.other]\nmodel = "siglip"\n[[boundaries]]\nfrom="other"\nto="llm"\nat="image"\n[parallelism.vision]',
        "boundaries[2].at: the rows of projector->llm already replace placeholder 'image'",
    ),
    "media of a reader": (
        'model = "mlp"',
        'model = "mlp"\nmedia = "image"',
        "modules.projector.media: only a module that no",
    ),
    "module name": ("[modules.projector]", '[modules."pro.jector"]', "modules.pro.jector: a module's name is made of"),
    "table of an unknown module": ("[parallelism.vision]", "[parallelism.visoin]", "did you mean 'vision'?"),
    "batch not divisible": (
        "local_batch_size = 64",
        "local_batch_size = 48\nglobal_batch_size = 64",
        "training.global_batch_size = 64 must be a multiple of training.local_batch_size x LLM lanes = 48 x 1 = 48; "
        "nearest are [48, 96], or a local_batch_size of [1, 2, 4, 8, 16, 32, 64]",
    ),
    "microbatch not divisible": (
        "tensor_parallel_degree = 2",
        "tensor_parallel_degree = 2\npipeline_parallel_microbatch_size = 48",
        "pipeline_parallel_microbatch_size = 48 must divide training.local_batch_size = 64; valid are [1, 2, 4, 8,",
    ),
    "schedule of an encoder": (
        "data_parallel_replicate_degree = 2",
        "data_parallel_replicate_degree = 2\npipeline_parallel_microbatch_size = 2",
        "parallelism.vision.pipeline_parallel_microbatch_size: the schedule is the whole run's; write it in [",
    ),
    "a key of the schedule, given twice": (
        "[parallelism.llm]",
        "[parallelism]\nbubble_fill_in_flight = 2\n[parallelism.llm]\nbubble_fill_in_flight = 3",
        "parallelism.bubble_fill_in_flight = 2 and parallelism.llm.bubble_fill_in_flight = 3: both are of the whole",
    ),
    "an unknown schedule": (
        "tensor_parallel_degree = 2",
        'pipeline_parallel_schedule = "gpipe"',
        "parallelism.llm.pipeline_parallel_schedule = 'gpipe': should be '1F1B', 'Interleaved1F1B', 'bubble_fill', "
        "'sequential', 'three_phase' or 'zero_bubble'",
    ),
    "async checkpoint": (
        "[data]",
        '[checkpoint]\nenable = true\nasync_mode = "async_with_pinned_mem"\n[data]',
        "checkpoint.async_mode = 'async_with_pinned_mem': of torchtitan's values hetmesh has only 'disabled' and "
        "'async'; write 'async': a thread writes what was copied, from a device into pinned memory",
    ),
    "TOML syntax": ("steps = 800", "steps = = 800", "not valid TOML: Invalid value (at line 34, column 9)"),
}


@pytest.mark.parametrize("what", BAD)
def test_each_kind_of_bad_recipe_gives_one_clear_error(what, tmp_path):
    old, new, says = BAD[what]
    assert DESIGN.count(old) >= 1
    path = tmp_path / "bad.toml"
    path.write_text(DESIGN.replace(old, new, 1))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert "\n" not in message


def test_all_keys_and_values_that_are_wrong_are_said_at_once(tmp_path):
    text = DESIGN.replace("steps = 800", "stpes = 800\nseq_len = 0\ngc_debug = true").replace(
        "freq = 100", "freq = true"
    )
    path = tmp_path / "bad.toml"
    path.write_text(text.replace('to = "llm"', 'too = "llm"').replace("[data]", "[date]"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert [line.removeprefix(f"{path}: ").split(" ")[0] for line in lines] == [
        "boundaries[1].too:",
        "[date]:",
        "training.stpes:",
        "training.gc_debug",
        "boundaries[1].to",
        "training.seq_len",
        "validation.freq",
    ]


TWO_PLACEHOLDERS = """
[modules.second]
model = "mlp"
[[boundaries]]
from = "vision"
to = "second"
[[boundaries]]
from = "second"
to = "llm"
at = "glance"
"""


def test_an_encoder_of_several_placeholders_says_which_media_it_reads():
    with pytest.raises(RecipeError) as caught:
        parse_recipe(DESIGN + TWO_PLACEHOLDERS, ("--parallelism.vision.data_parallel_replicate_degree", "3"))
    missing, mesh = str(caught.value).splitlines()
    assert missing == (
        "modules.vision.media is missing: the rows of 'vision' replace the placeholders ['image', 'glance']; say which "
        'media it reads, e.g. media = "image"'
    )
    assert mesh.startswith("parallelism.vision: ")
    given = parse_recipe(DESIGN + TWO_PLACEHOLDERS, ("--modules.vision.media", "glance"))
    assert given.wiring.media == {"vision": "glance", "projector": None, "llm": None, "second": None}


def test_all_boundaries_and_ranks_that_do_not_fit_are_said_at_once():
    text = DESIGN.replace('at = "image"', "").replace("tensor_parallel_degree = 2", "tensor_parallel_degree = 3")
    text = text.replace("data_parallel_replicate_degree = 2", "data_parallel_replicate_degree = 3")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text.replace('model = "mlp"', 'model = "mlp"\nmedia = "image"'))
    assert [line.split(" ")[0] for line in str(caught.value).splitlines()] == [
        "boundaries[1].at",
        "modules.projector.media:",
        "parallelism.llm:",
        "parallelism.vision:",
    ]


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("parallelism.llm.pipeline_parallel_schedule", SCHEDULES),
        ("parallelism.llm.context_parallel_assignment", ASSIGNMENTS),
        ("modules.llm.attention_mask", MASKS),
    ],
)
def test_what_a_registry_gains_a_recipe_may_name(key, registry, monkeypatch):
    with pytest.raises(RecipeError, match=re.escape(f"{key} = 'mine': should be ")):
        parse_recipe(DESIGN, (f"--{key}", "mine"))
    module, name = registry
    monkeypatch.setattr(module, name, {**getattr(module, name), "mine": None})
    parse_recipe(DESIGN, (f"--{key}", "mine"))


def test_missing_files(tmp_path):
    with pytest.raises(RecipeError, match=r"recipe .*none.toml cannot be read: no such file or directory"):
        load_recipe(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match="cannot be read: is a directory"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"recipe llama3/config_registry.py: a Python config, as torchtitan has from"):
        load_recipe("llama3/config_registry.py")
    with pytest.raises(RecipeError, match=re.escape("[modules.<name>] is missing")):
        parse_recipe("")


def test_harmless_values_of_keys_to_come_are_accepted():
    text = ONE_MODULE + '[activation_checkpoint]\nmode = "none"\n[compile]\nenable = false\n[parallelism]\n'
    text += "pipeline_parallel_degree = 1\nenable_sequence_parallel = false\n"
    assert parse_recipe(text).modules == parse_recipe(ONE_MODULE).modules


def test_the_keys_table_matches_the_recipe():
    assert set(SECTIONS) == set(Recipe.model_fields) - {"without_effect"}
    assert valid_keys("boundaries") == ("from", "to", "at", "layer")
    for model in SECTIONS.values():
        assert issubclass(model, BaseModel)
        assert model.model_config.get("frozen")
        assert model.model_config.get("extra") == "forbid"


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_recipes_parse(path):
    recipe = load_recipe(path)
    assert recipe.job.description
    if path.stem in ("digits", "digits_colocated", "digits_overlapping", "digits_single"):
        assert recipe.batch.global_batch_size == 64
        assert recipe.job.dump_folder == f"./outputs/{path.stem}"


@pytest.mark.parametrize("key", ["optimizer.name", "data.source", "modules.llm.model", "modules.llm.loss.kind"])
def test_a_recipe_knows_where_it_lies_whichever_table_names_code(tmp_path, key):
    path = tmp_path / "recipe.toml"
    path.write_text(DESIGN)
    assert load_recipe(path).code_folder is None
    more = ["--modules.llm.loss.unit", "tokens"] if "loss" in key else []
    assert load_recipe(path, [f"--{key}", "own:Code", *more]).code_folder == str(tmp_path)
