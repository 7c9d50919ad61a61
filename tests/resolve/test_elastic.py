"""Which layout an elastic run takes for a number of ranks, what is no layout of it, and what is said of a change."""

import re
from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.recipe.rewrite import rewritten
from hetmesh.resolve.elastic import (
    NamedLayout,
    PredictedLayout,
    fastest,
    last_layout,
    layout_line,
    layouts_for,
    run_layouts,
    same_layout,
)

DIGITS = (Path(__file__).parents[2] / "recipes" / "digits.toml").read_text()
ON_THREE = {"vision": {"ranks": [0]}, "llm": {"ranks": [1, 2], "tensor_parallel_degree": 2}}
ON_FIVE = {"vision": {"ranks": [0, 1]}, "llm": {"ranks": [2, 3, 4], "data_parallel_replicate_degree": 3}}


@pytest.fixture
def write(tmp_path):
    """`write("three", ON_THREE, {("training", "steps"): 9})`: the digits in a layout, with other values of keys."""
    for name, layout in (("digits", None), ("three", ON_THREE)):
        tables = {("elastic", "layouts"): ["three.toml"]} if layout is None else {("parallelism",): layout}
        (tmp_path / f"{name}.toml").write_text(rewritten(DIGITS, tables))

    def written(name, layout, values=()):
        (tmp_path / f"{name}.toml").write_text(rewritten(DIGITS, {("parallelism",): layout, **dict(values)}))

    written.path = tmp_path / "digits.toml"
    return written


def layouts(path, *overrides):
    return run_layouts(path, load_recipe(path, overrides), overrides)


def test_the_layouts_of_a_run_are_its_own_and_those_that_it_names(write):
    overrides = ("--training.steps", "7", "--parallelism.vision.ranks", "[0]", "--training.local_batch_size=64")
    four, three = layouts(write.path, *overrides, "--parallelism.vision.data_parallel_replicate_degree", "1")
    assert (four.name, four.ranks, four.recipe.training.steps) == ("digits.toml", 4, 7)
    assert (three.name, three.ranks, three.recipe.training.steps) == ("three.toml", 3, 7)
    assert three.recipe.elastic == four.recipe.elastic
    assert four.recipe.parallelism.modules["vision"].ranks == (0,)  # an override of the layout is of this one alone
    assert three.recipe.parallelism.modules["vision"].data_parallel_replicate_degree is None
    assert same_layout(three.recipe, load_recipe(write.path.with_name("three.toml")))
    assert not same_layout(three.recipe, four.recipe)
    assert last_layout([four, three], three.recipe).name == "three.toml"
    assert last_layout([four], three.recipe).name == "another layout"


OTHERS = {
    "another seed": (ON_THREE, {("debug", "seed"): 1}, "debug.seed = 1 in place of 0; only [activation_checkpoint], ["),
    "another model": (
        ON_THREE,
        {("modules", "llm", "config", "hidden_size"): 48, ("data", "source"): "synthetic"},
        "data.source = 'synthetic' in place of 'digits', modules.llm.config.hidden_size = 48 in place of 96; only",
    ),
    "another batch": (
        ON_THREE,
        {("training", "local_batch_size"): 32},
        "training.global_batch_size = 32 in place of 64; only",
    ),
    "lanes that do not divide it": (
        ON_FIVE,
        {("training", "global_batch_size"): 64, ("training", "local_batch_size"): 8},
        "training.global_batch_size = 64 must be a multiple of training.local_batch_size x LLM lanes = 8 x 3 = 24",
    ),
    "a mistyped key": (ON_THREE, {("training", "step"): 5}, "training.step: unknown key 'step'; did you mean 'steps'?"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_check_refuses_what_is_no_layout_of_the_run(write, capsys, what):
    layout, values, said = OTHERS[what]
    write("three", layout, values)
    assert main(["check", str(write.path)]) == 2
    of = "of another run than digits.toml: " if "place of" in said else ""
    assert capsys.readouterr().err.startswith(f"error: elastic.layouts[0] = 'three.toml': {of}{said}")


def test_check_says_which_layouts_there_are(write, capsys):
    assert main(["check", str(write.path)]) == 0
    assert capsys.readouterr().out.startswith("elastic: layouts of 4 ranks (digits.toml), 3 ranks (three.toml)\n")
    write("three", ON_THREE | {"llm": {"ranks": [1, 2, 3], "tensor_parallel_degree": 3}})
    assert main(["check", str(write.path)]) == 2
    assert capsys.readouterr().err.startswith("error: elastic.layouts: three.toml: parallelism.llm.tensor_parallel_")
    assert main(["check", str(write.path), "--checkpoint.enable", "false"]) == 2
    assert "elastic: it takes checkpoint.enable = true" in capsys.readouterr().err
    write.path.with_name("three.toml").unlink()
    assert main(["check", str(write.path)]) == 2
    said = capsys.readouterr().err
    assert re.match(r"error: elastic.layouts\[0\] = 'three.toml': recipe .*three.toml cannot be read: no such", said)


@pytest.fixture
def named(write):
    recipes = {each.ranks: each.recipe for each in layouts(write.path)}
    return lambda name, ranks: NamedLayout(name, recipes[ranks])


def test_a_number_of_ranks_without_a_layout_names_the_nearest(named):
    there = [named("digits.toml", 4), named("a.toml", 3), named("b.toml", 3)]
    assert [each.name for each in layouts_for(there, 3)] == ["a.toml", "b.toml"]
    assert layouts_for(there, 4) == there[:1]
    said = r"elastic: no layout is of 2 ranks; the nearest is a.toml of 3 \(there are layouts of 3, 4\): start 3, name"
    with pytest.raises(RecipeError, match=said):
        layouts_for(there, 2)
    with pytest.raises(RecipeError, match=r"no layout is of 9 ranks; the nearest is digits\.toml of 4 "):
        layouts_for(there, 9)


def test_the_fastest_that_fits_is_taken(named):
    layout = named("a.toml", 3)
    slow, quick = PredictedLayout(layout, 0.3, 0), PredictedLayout(layout, 0.2)
    too_large, unknown = PredictedLayout(layout, 0.1, -(2 * 10**9)), PredictedLayout(layout)
    assert fastest([slow, too_large, quick, unknown]) is quick
    assert fastest([too_large, unknown]) is unknown
    with pytest.raises(RecipeError, match=r"elastic: no layout of 3 ranks fits: a.toml lacks 2 GB on a rank$"):
        fastest([too_large])


def test_a_layout_is_predicted_by_the_simulator_and_the_memory_model(named):
    three = PredictedLayout.of(named("three.toml", 3))
    assert three.step_s == PredictedLayout.of(named("three.toml", 3)).step_s > 0
    machine = three.layout.recipe.metrics.model_copy(update={"machine": "h100"})
    fits = PredictedLayout.of(NamedLayout("a", three.layout.recipe.model_copy(update={"metrics": machine})))
    assert 60e9 < fits.spare_bytes < 80e9


def test_one_line_says_what_has_changed_and_what_it_costs(named):
    three, four = PredictedLayout(named("a.toml", 3), 0.0123), PredictedLayout(named("digits.toml", 4), 0.00914, 5)
    assert layout_line(three) == "elastic: 3 ranks (a.toml, step predicted 12.3 ms)"
    assert layout_line(three, four, 40, 3) == (
        "elastic: 3 ranks (a.toml, step predicted 12.3 ms) in place of 4 (digits.toml, step predicted 9.14 ms); goes "
        "on after step 40, 3 steps lost"
    )
    assert layout_line(four, PredictedLayout(named("a.toml", 3), None, -(10**9)), 41) == (
        "elastic: 4 ranks (digits.toml, step predicted 9.14 ms) in place of 3 (a.toml, step not predicted, lacks 1 GB "
        "on a rank); goes on after step 41"
    )
