"""`hetmesh balance`: what it predicts is what runs, samples of which only lengths are known, text, JSON and picture."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from hetmesh.balance import POLICIES, assign, plan_batch
from hetmesh.cli import main
from hetmesh.data.lengths import read_lengths
from hetmesh.errors import GraphError, RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.report.balance_text import WIDTH, balance_text
from hetmesh.report.balance_values import Histogram
from hetmesh.report.balance_view import GivenLengths, balance_view
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(name, *overrides):
    return load_recipe(RECIPES / f"{name}.toml", overrides)


@pytest.fixture(scope="module")
def charts(tmp_path_factory):
    """A file of images of very different sizes, whose text grows with them; every fifth sample is text alone."""
    rng = np.random.default_rng(0)
    rows = np.minimum(4 * np.exp(rng.standard_normal(300)), 60).astype(int) * (rng.random(300) > 0.2)
    path = tmp_path_factory.mktemp("lengths") / "charts.jsonl"
    path.write_text("".join(json.dumps({"vision": int(n), "llm": 8 + int(n) + int(n) // 2}) + "\n" for n in rows))
    return str(path)


@pytest.fixture(scope="module")
def view(charts):
    given = recipe("digits_balanced", "--balance.deferral=true", "--parallelism.llm.pipeline_parallel_degree=1")
    return balance_view(resolve(given), lengths=charts, batches=2, machine="h100")


@pytest.mark.slow
def test_what_is_predicted_is_what_runs():
    """The row of the recipe's own policy, and that of none, are the steps that training has and `simulate` shows."""
    given = recipe("digits_balanced")
    found = {each.name: each for each in balance_view(resolve(given), batches=1, machine="h100").balancers}
    assert [name for name, each in found.items() if each.recipe] == ["auto"]
    for name, keys in (
        ("auto", ()),
        ("none", ("--balance.policy=none",)),
        ("entrain, deferral", ("--balance.policy=entrain", "--balance.deferral=true")),
    ):
        other = recipe("digits_balanced", *keys)
        assert found[name].seconds == simulate_recipe(resolve(other), machine="h100").makespan


def test_every_balancer_is_compared(view):
    names = [each.name for each in view.balancers]
    assert names[0] == "none"
    assert set(POLICIES) < set(names)
    found = {each.name: each for each in view.balancers}
    for module in ("vision", "llm"):
        drawn, even = found["none"].modules[module], found["auto"].modules[module]
        assert drawn.std_over_mean > 2 * even.std_over_mean
        assert drawn.max_over_mean > 1.2 * even.max_over_mean
    assert found["entrain"].deferred > 0
    assert found["none"].deferred == 0
    assert found["none"].gain == 1.0
    for each in view.balancers:
        assert each.gain == pytest.approx(found["none"].seconds / each.seconds)
    for batch in view.choices:
        assert sum(each.chosen for each in batch) == 1
        assert batch[0].name == "two_dim"


def test_sizes_and_loads_are_counted_once_each(view):
    vision, llm = view.modules
    assert (vision.unit, llm.unit, llm.followers) == ("rows", "tokens", ("projector",))
    for module in view.modules:
        assert sum(module.samples.counts) == 2 * view.samples
        for loads in module.loads.values():
            assert sum(loads.counts) == 2 * 8 * module.lanes
    assert llm.mean == pytest.approx(8 + 1.5 * vision.mean, abs=0.5)


def test_histograms():
    even = Histogram.of(np.array([0.0, 0.5, 1.0]), 1.0)
    assert (even.counts[0], even.counts[5], even.counts[-1], len(even.counts)) == (1, 1, 1, 10)
    small = Histogram.of_counts(np.array([1, 2, 3, 3]))
    assert (small.edges, small.counts) == ((0, 1, 2, 3), (0, 1, 3))
    wide = Histogram.of_counts(np.array([1] * 99 + [1000]))
    assert (wide.edges[-2:], sum(wide.counts), wide.counts[-1]) == ((500, 1000), 100, 1)
    assert Histogram.of_counts(np.array([], np.int64)).counts == (0,)


def test_lengths_become_what_modules_would_see(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"vision": 10, "llm": 20}\n{"llm": 300}\n{"vision": 8, "llm": 1}\n')
    given = recipe("digits_qwen3vl")
    resolved = resolve(given)
    graph = resolved.graph
    samples = GivenLengths(read_lengths(path), graph, resolved.adapters, 128)
    first, text, short = (samples.meta(i) for i in range(3))
    assert (first.tokens, first.rows["vision"], first.num_targets) == (20, 3, 16)  # four patches make a row
    assert (text.tokens, text.media, text.num_targets) == (300, (), 299)
    assert (short.tokens, short.rows["vision"]) == (3, 2)  # a row takes the place of a token
    told = " ".join(samples.notes)
    assert "1 of 3 samples have fewer tokens of 'llm' than rows" in told
    assert "line 3: 1 tokens, 2 rows" in told
    assert "1 of 3 samples are longer than training.seq_len = 128" in told
    batches = [sample.id for batch in samples.batches(2, 3, seed=0) for sample in batch]
    assert sorted(batches[:3]) == sorted(batches[3:]) == ["line 1", "line 2", "line 3"]
    plan = plan_batch(graph, [first, text, short], 3, resolved.balance)
    assert plan.num_tokens == 323


@pytest.mark.slow
def test_text_and_json(view):
    text = balance_text(view)
    assert max(map(len, text.splitlines())) <= WIDTH == 120
    for each in view.balancers:
        assert each.name in text
    best = max(view.balancers, key=lambda each: each.gain)
    own = next(each for each in view.balancers if each.recipe)
    slower = best.gain > 1.005 * own.gain
    assert (f"fastest here: {best.name}, {best.gain:.3f}x; the recipe's auto: {own.gain:.3f}x" in text) == slower
    json.dumps(asdict(view), allow_nan=False)


def test_many_modules_fit_into_lines(capsys):
    """Of two encoders and two projectors, each on ranks of its own."""
    tables = [f"--parallelism.{name}.ranks={i}" for i, name in enumerate(("projector", "audio_projector"), 4)]
    assert main(["balance", str(RECIPES / "digits_omni.toml"), "--batches", "1", *tables]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    assert "every module has one lane and one microbatch: there is nothing to balance" in out.replace("\n  ", " ")


def test_what_does_not_fit_is_named(charts, tmp_path, capsys):
    digits = str(RECIPES / "digits.toml")
    path = tmp_path / "bad.jsonl"
    for line, said in (
        ('{"audio": 1, "llm": 2}', "line 2, key 'audio': unknown module 'audio'. Valid are: vision, projector, llm"),
        ('{"vision": 1}', "line 2, key 'llm': got 0 tokens; valid are 1 or more"),
    ):
        path.write_text('{"vision": 4, "llm": 9}\n' + line)
        assert main(["balance", digits, "--lengths", str(path)]) == 2
        assert f"{path}, {said}" in capsys.readouterr().err
    assert main(["balance", digits, "--batches", "0"]) == 2
    assert "--batches 0: must be at least 1" in capsys.readouterr().err
    with pytest.raises(GraphError, match=r"sample 'line \d+' has \d+ tokens for module 'llm'; max_tokens .* is 20"):
        balance_view(resolve(recipe("digits", "--balance.max_tokens={llm = 20}")), lengths=charts)
    with pytest.raises(RecipeError, match="nowhere"):
        balance_view(resolve(recipe("digits")), lengths="nowhere")


@pytest.mark.slow
def test_a_policy_that_finds_no_way_is_named_and_the_others_are_compared(monkeypatch):
    def sorted_finds_none(loads, slots, policy):
        if policy == "sorted":
            raise GraphError("no way")
        return assign(loads, slots, policy)

    monkeypatch.setattr("hetmesh.report.balance_view.assign", sorted_finds_none)
    found = balance_view(
        resolve(recipe("digits_balanced", "--balance.max_tokens={llm = 250}")), batches=1, machine="h100"
    )
    assert [each.name for each in found.balancers if each.problem] == ["sorted"]
    assert found.notes == ("sorted: no way",)
    assert found.modules[-1].cap == 250
    text = balance_text(found)
    assert "at most 250 tokens in each" in text
    assert "note: sorted: no way" in text
    with pytest.raises(GraphError, match="no way"):
        balance_view(resolve(recipe("digits_balanced", "--balance.policy=sorted")), batches=1, machine="h100")


@pytest.mark.slow
def test_how_evenly_experts_are_used_is_told_as_a_run_measured_it_or_taken_to_be_even(tmp_path, capsys):
    folder = tmp_path / "run"
    given = [str(RECIPES / "digits_moe.toml"), "--batches", "1", "--machine", "h100", "--job.dump_folder", str(folder)]
    assert main(["balance", *given]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "experts of llm: 3 blocks of 8, of which a token has 2, over 2 ranks;" in out
    assert "routing, which depends on weights, is taken to be even" in out
    folder.mkdir()
    loads = [{"balance_loss": 2.1, "max_over_mean": spread, "without_tokens": 3} for spread in (2.0, 1.5)]
    lines = [
        {"step": 10 * i, "loss": 1.0, **({"experts": {"llm": load}} if load else {})}
        for i, load in enumerate([None, *loads])
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["balance", *given]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "experts of llm: 3 blocks of 8, of which a token has 2, over 2 ranks;" in out
    assert "as its run measured: 1.75 over 2 logged steps, 1.50 in step 20, where 3 experts got none" in out
