"""The balance benchmark: its keys, its laws, files of lengths, and the simulator beside its recurrence."""

import argparse
import importlib
import json
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "tools"
KEYS = {
    "encoder_std_reduction_chart4k",
    "llm_std_reduction_chart4k",
    "worst_over_bound_encoder",
    "worst_over_bound_llm",
    "throughput_gain_chart",
    "throughput_gain_worst",
    "auto_worst_regret",
    "auto_worst_regret_unseen",
    "auto_worst_regret_unseen_default",
    "assign_ms_4096",
    "auto_ms_4096",
    "assign_ms_65536",
    "laws",
}


@pytest.fixture
def load(monkeypatch):
    """`load("benchmarks.balance")`: a module of tools/."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.fixture
def small(load, monkeypatch):
    """The benchmark with small batches to time."""
    balance = load("benchmarks.balance")
    monkeypatch.setattr(balance, "SMALL", (64, 2))
    monkeypatch.setattr(balance, "LARGE", (128, 2))
    return balance


def run(module, *given):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args(["--batches", "1", "--runs", "1", *given]))


@pytest.mark.exhaustive
def test_the_chart_law_gains_in_every_module(small):
    result = run(small, "--only", "chart-4k", "--size", "4")
    assert result.keys() >= KEYS
    assert result["encoder_std_reduction_chart4k"] > 8
    assert result["llm_std_reduction_chart4k"] > 8
    assert result["worst_over_bound_encoder"] < 1.2
    assert result["worst_over_bound_llm"] < 1.2
    assert result["throughput_gain_chart"] > 1.3
    assert result["auto_worst_regret"] <= 0.01
    assert result["auto_worst_regret_unseen_default"] <= 0.05
    assert result["simulator_difference"] < 1e-9
    assert "chart-4k" in small.table(result)
    json.dumps(result, allow_nan=False)


@pytest.mark.exhaustive
def test_lengths_of_a_file_of_any_modules(small, tmp_path):
    rng = np.random.default_rng(0)
    lines = [{"audio": int(n), "llm": int(n) // 2 + 9, "vision": int(m)} for n, m in rng.integers(0, 3000, (200, 2))]
    del lines[3]["audio"]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    result = run(small, "--lengths", str(path), "--size", "2")
    assert result.keys() >= KEYS
    assert [key for key, value in result.items() if value is None] == [
        "encoder_std_reduction_chart4k",
        "llm_std_reduction_chart4k",
        "throughput_gain_chart",
        "throughput_gain_chart_fixed",
        "throughput_gain_chart_default",
    ]
    (law,) = result["laws"]
    assert law["law"] == "mine"
    assert law["balancers"]["auto"]["over_bound"].keys() == {"audio", "vision", "llm"}
    json.dumps(result, allow_nan=False)


def test_a_bad_line_is_named(load, tmp_path):
    cases = load("benchmarks.balance.cases")
    path = tmp_path / "bad.jsonl"
    path.write_text('{"llm": 5}\n{"llm": -1}')
    with pytest.raises(SystemExit, match=r"bad\.jsonl, line 2, key 'llm': got -1"):
        cases.file_law(path)


def test_every_law_draws_whole_numbers_of_all_its_modules(load):
    laws, fitted = load("benchmarks.balance.laws"), load("benchmarks.balance.fitted")
    for name, law in {**laws.LAWS, **fitted.FITTED}.items():
        rows = law(500, np.random.default_rng(0), 0.5)
        assert list(rows)[-1] == "llm", name
        for count, pairs in rows.values():
            assert count.shape == pairs.shape == (500,)
            assert count.dtype == pairs.dtype == np.int64
            assert count.min() >= 0
            assert (pairs >= count).all()
        assert rows["llm"][0].min() > 0


def test_the_published_tiles_and_the_drift(load):
    laws = load("benchmarks.balance.laws")
    rng = np.random.default_rng(0)
    rows = laws.tiles(20000, rng, 0.0)
    tiles = rows["vision"][0] // 1024
    assert [float((tiles == n).mean()) for n in (1, 3, 4, 5)] == pytest.approx([0.09, 0.34, 0.01, 0.56], abs=0.01)
    text = rows["llm"][0] - 256 * tiles
    assert text.mean() == pytest.approx(124, rel=0.05)
    assert np.corrcoef(tiles, rows["llm"][0])[0, 1] == pytest.approx(0.95, abs=0.01)
    for progress, shares in ((0.0, (0.52, 0.41, 0.07)), (1.0, (0.35, 0.55, 0.10))):
        rows = laws.mixture(20000, rng, progress)
        image, sound = rows["vision"][0] > 0, rows["audio"][0] > 0
        assert [1 - image.mean() - sound.mean(), image.mean(), sound.mean()] == pytest.approx(shares, abs=0.01)


def test_auto_is_judged_by_costs_that_it_has_not_seen(load, monkeypatch):
    """An `auto` that takes the worst of all balancers has a regret, by those costs as by its own."""
    compare, cases = load("benchmarks.balance.compare"), load("benchmarks.balance.cases")
    case = cases.Case.of("chart-4k", load("benchmarks.balance.laws").LAWS["chart-4k"])
    loads = case.loads(64, 0)
    unseen = compare.with_unseen_costs(loads, 0)
    off = np.log(unseen.work / loads.work)
    assert off.std() == pytest.approx(compare.UNSEEN, rel=0.2)
    monkeypatch.setattr(compare, "BALANCERS", {"none": {}, "two_dim": {}, "auto without deferral": {}})
    monkeypatch.setattr(compare, "OURS", {"": "auto without deferral"})
    sound = compare.compare(case, 2, 1)
    assert abs(sound["auto_regret_unseen"]) < 0.1
    assign = compare.assign
    monkeypatch.setattr(compare, "assign", lambda a, b, name: assign(a, b, "none" if name == "auto" else name))
    poor = compare.compare(case, 2, 1)
    assert min(poor["auto_regret"], poor["auto_regret_unseen"]) > 0.2


@pytest.mark.exhaustive
def test_laws_that_are_fitted_to_disttrain_alone_meet_it_and_entrain_is_held_out(load):
    cases, fitted = load("benchmarks.balance.cases"), load("benchmarks.balance.fitted")
    off = []
    for name, law in fitted.HELD_OUT.items():
        assert (law.spread, law.cut, law.coupled, law.text_spread, law.text_cut) == (0.9, 16.0, 0.0, 0.9, 16.0)
        found = fitted.against_published(cases.Case.of(name, law, fitted.SLOWER), 6)
        for module, row in found.items():
            assert row["disttrain"] == pytest.approx(row["published_disttrain"], rel=0.1), (name, module)
            off.append(abs(row["entrain"] / row["published_entrain"] - 1))
    assert max(off) > 0.15  # what FITTED was searched to meet


@pytest.mark.exhaustive
def test_laws_that_were_searched_for_both_columns_still_meet_them_and_auto_varies_less(load):
    cases, fitted = load("benchmarks.balance.cases"), load("benchmarks.balance.fitted")
    for name, law in fitted.FITTED.items():
        found = fitted.against_published(cases.Case.of(name, law, fitted.SLOWER), 6)
        for module, row in found.items():
            assert row["disttrain"] == pytest.approx(row["published_disttrain"], rel=0.1), (name, module)
            assert row["entrain"] == pytest.approx(row["published_entrain"], rel=0.15), (name, module)
            assert row["auto"] < row["entrain"], (name, module)


def test_what_no_assignment_can_avoid(load):
    compare = load("benchmarks.balance.compare")
    from hetmesh.balance import BatchLoads

    loads = BatchLoads(("llm",), np.array([[5]] * 6 + [[1]] * 4))
    assert compare.pair_bound(loads, 5) == [pytest.approx(10 / 6.8)]  # two of the six largest share a microbatch
    assert compare.pair_bound(loads, 6) == [pytest.approx(6 / (34 / 6))]
