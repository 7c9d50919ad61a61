"""Every key of torchtitan 0.2.2: taken at its default, or refused, all at once, with what to write instead."""

import json
from pathlib import Path

import pytest
import tomlkit

from hetmesh.errors import RecipeError
from hetmesh.recipe.keys import SECTIONS, valid_keys
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.recipe.torchtitan_keys import FOREIGN
from hetmesh.resolve.refusals import check_recipe, check_run

DEFAULTS = json.loads((Path(__file__).parent / "torchtitan_0_2_2.json").read_text())["defaults"]
MODULE = '[modules.llm]\nmodel = "qwen3"\n'
REFUSED = {
    "model.name": "[modules.<name>]",
    "model.flavor": "[modules.<name>.config]",
    "model.hf_assets_path": "[model] hf_path",
    "training.dataset": "[data] source",
    "activation_checkpoint.selective_ac_option": "write 'op'",
}
"""Keys whose defaults hetmesh does not have -> what to write instead."""


def without_none(value):
    """TOML has no None: a key without a value is left out."""
    return {k: without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def dumped(changes=(), without=()):
    """All of torchtitan's defaults as a recipe, and a module."""
    tables = json.loads(json.dumps(without_none(DEFAULTS)))
    for name in without:
        section, _, key = name.partition(".")
        del tables[section][key]
    for name, value in dict(changes).items():
        *inside, key = name.split(".")
        table = tables
        for part in inside:
            table = table[part]
        table[key] = value
    return MODULE + tomlkit.dumps(tables)


def leaves(table, before=()):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, (*before, key))
        else:
            yield (*before, key)


def test_every_key_is_a_field_or_known():
    for section, *key in leaves(DEFAULTS):
        name = ".".join(key)
        assert name in FOREIGN.get(section, {}) or name in valid_keys(section), (section, name)
    for section, keys in FOREIGN.items():
        assert section in SECTIONS or section in DEFAULTS
        assert all(row.instead or row.accepted or row.without_effect for row in keys.values())
        assert all(bool(row.note) == (row.without_effect != ()) for row in keys.values())


def test_all_defaults_at_once_name_every_refusal_with_what_to_write():
    with pytest.raises(RecipeError) as caught:
        parse_recipe(dumped())
    lines = dict(line.split(" = ", 1) for line in str(caught.value).splitlines())
    assert set(lines) == set(REFUSED)
    assert all(REFUSED[key] in said for key, said in lines.items())


def test_all_other_defaults_are_taken_and_what_does_nothing_is_said():
    recipe = parse_recipe(dumped(without=REFUSED))
    assert recipe.schedule == "1f1b"
    assert (recipe.training.mixed_precision_param, recipe.lr_scheduler.warmup_steps) == ("bfloat16", 200)
    assert (recipe.validation.enable, recipe.activation_checkpoint.mode) == (False, "selective")
    assert [line.split(" = ")[0] for line in recipe.without_effect] == ["training.gc_freq", "comm.trace_buf_size"]
    check_recipe(recipe)
    check_run(recipe)


def test_keys_of_what_is_on_are_said_or_refused():
    """The same defaults mean something once a feature is on."""
    on = {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.context_parallel_degree": 2,
        "checkpoint.enable": True,
        "metrics.enable_tensorboard": True,
    }
    shape = {"parallelism.data_parallel_shard_degree": 1, "parallelism.llm": {"ranks": "0-7"}}
    recipe = parse_recipe(dumped({**on, **shape}, REFUSED))
    assert {line.split(" = ")[0] for line in recipe.without_effect} == {
        "training.gc_freq",
        "comm.trace_buf_size",
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "parallelism.context_parallel_load_balancer",
        "parallelism.context_parallel_rotate_method",
        "checkpoint.last_save_model_only",
        "metrics.save_tb_folder",
    }
    with pytest.raises(RecipeError) as caught:
        parse_recipe(dumped({"validation.enable": True}, REFUSED))
    assert str(caught.value).startswith("validation.dataset = 'c4_validation': a key of torchtitan's that")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("parallelism.pipeline_parallel_schedule", "ZBVZeroBubble", "does not have it; write 'zero_bubble'"),
        ("parallelism.pipeline_parallel_schedule", "InterleavedZeroBubble", "write 'zero_bubble'"),
        ("parallelism.pipeline_parallel_schedule", "GPipe", "write '1F1B'"),
        ("parallelism.pipeline_parallel_schedule_csv", "a.csv", "name a schedule in pipeline_parallel_schedule"),
        ("activation_checkpoint.mode", "memory_budget", "write 'selective'"),
        ("training.dataloader.num_workers", 4, "write [data] num_workers"),
        ("model.converters", ["float8"], "hetmesh computes in float32 or bfloat16"),
        ("profiling.enable_profiling", True, "[profiling] timeline = true"),
        ("checkpoint.initial_load_in_hf", True, "[model] hf_path takes a Hugging Face directory"),
        ("comm.mode", "fake_backend", "`hetmesh check`"),
        ("fault_tolerance.enable", True, "resumes from its last checkpoint"),
        ("quantize.linear.float8.recipe", "x", "quantize.linear.float8.recipe: unknown key"),
        ("training.dataloader.workers", 4, "training.dataloader.workers: unknown key 'dataloader.workers'; did you"),
    ],
)
def test_other_values_are_refused_with_what_to_write(key, value, says):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(dumped({key: value}, REFUSED))
    assert str(caught.value).startswith(key)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "policy"),
    [("1F1B", "1f1b"), ("1f1b", "1f1b"), ("Interleaved1F1B", "interleaved"), ("interleaved", "interleaved")],
)
def test_schedules_are_spelled_as_torchtitan_does_or_by_their_policy(written, policy):
    assert parse_recipe(MODULE + f"[parallelism]\npipeline_parallel_schedule = '{written}'").schedule == policy
    keys = f"[parallelism]\npipeline_parallel_schedule = 'bubble_fill'\nbubble_fill_schedule = '{written}'"
    assert parse_recipe(MODULE + keys).llm_schedule == policy


@pytest.mark.parametrize(
    ("overrides", "read", "expected"),
    [
        (["--checkpoint.enable"], lambda r: r.checkpoint.enable, True),
        (
            ["--checkpoint.enable", "--training.steps", "3"],
            lambda r: (r.checkpoint.enable, r.training.steps),
            (True, 3),
        ),
        (["--checkpoint.no-enable"], lambda r: r.checkpoint.enable, False),
        (["--balance.deferral"], lambda r: r.balance.deferral, True),
        (["--balance.no-deferral"], lambda r: r.balance.deferral, False),
        (["--balance.deferral", "auto"], lambda r: r.balance.deferral, "auto"),
        (["--training.local-batch-size", "2"], lambda r: r.training.local_batch_size, 2),
        (["--compile.components=model,loss"], lambda r: r.compile.components, ("model", "loss")),
        (["--checkpoint.exclude_from_loading", "llm"], lambda r: r.checkpoint.exclude_from_loading, ("llm",)),
        (["--training.no-gc-debug"], lambda r: r.without_effect, ()),
        (["--modules.llm.config.a-b", "1"], lambda r: r.modules["llm"].config, {"a-b": 1}),
    ],
)
def test_overrides_in_the_form_of_torchtitans_command_line(overrides, read, expected):
    assert (
        read(parse_recipe(MODULE + "[checkpoint]\nenable = true" * ("--checkpoint.no-enable" in overrides), overrides))
        == expected
    )
    with pytest.raises(RecipeError, match="give it a value"):
        parse_recipe(MODULE, ["--training.steps"])
    with pytest.raises(
        RecipeError, match=r"profiling\.enable_profiling = True: of torchtitan's values hetmesh has only False"
    ):
        parse_recipe(MODULE, ["--profiling.enable_profiling"])
