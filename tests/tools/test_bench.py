"""The benchmarks run and say what they promise. No time is asserted anywhere."""

import argparse
import gc
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from hetmesh.cost import StageCost, StepCosts, load_machine
from hetmesh.graph import Stage
from hetmesh.layout import plan_transfer
from hetmesh.testing.bounds import minimal_bytes

TOOLS = Path(__file__).parents[2] / "tools"
PACKAGES = {"advantage", "balance", "boundary", "bubble", "frozen", "optimus", "schedule", "straggler"}
NAMES = sorted({p.stem for p in (TOOLS / "benchmarks").glob("*.py")} - {"__init__"} | PACKAGES)


@pytest.fixture
def load(monkeypatch):
    """`load("benchmarks.boundary")`: a module of tools/."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.fixture
def young_heap():
    """What the session has imported is left out of the collections that measuring makes: 0.3 s each."""
    gc.freeze()
    yield
    gc.unfreeze()


def options(module, *given):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(given)


def test_help_lists_the_benchmarks(load, capsys):
    with pytest.raises(SystemExit):
        load("bench").main(["--help"])
    out = capsys.readouterr().out
    for name in NAMES:
        (line,) = (text for text in out.splitlines() if text.startswith(f"  {name} "))
        assert len(line.split()) > 5, "says what it measures"


def test_an_unknown_benchmark_is_refused_with_the_list(load, capsys):
    with pytest.raises(SystemExit):
        load("bench").main(["bondary"])
    assert "boundary" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_each_benchmark_has_help_and_the_common_options(name, load, capsys):
    with pytest.raises(SystemExit) as exit_:
        load("bench").main([name, "--help"])
    assert exit_.value.code == 0
    assert "--json" in capsys.readouterr().out
    module = load(f"benchmarks.{name}")
    assert callable(module.run)
    assert callable(module.table)


def test_the_result_is_printed_as_one_json_object_and_written(load, capsys, monkeypatch, tmp_path):
    module = load("benchmarks.boundary")
    monkeypatch.setattr(module, "run", lambda args: {"rounds": args.rounds})
    path = tmp_path / "new" / "boundary.json"
    assert load("bench").main(["boundary", "--json", "--rounds", "3", "--output", str(path)]) == 0
    written = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == written
    assert written == {"rounds": 3, "kept": written["kept"]}


@pytest.mark.exhaustive
def test_planning_is_timed_for_every_case(load, young_heap):
    plan_time = load("benchmarks.boundary.plan_time")
    times = plan_time.plan_times(32, steps=1)
    assert times.keys() == plan_time.cases(32).keys()
    assert all(t["ms"] > 0 and t["cpu_ms"] > 0 for t in times.values())


def test_planning_cases_draw_new_ragged_rows_every_step(load):
    plan_time = load("benchmarks.boundary.plan_time")
    import random

    for case in plan_time.cases(32).values():
        drawn = [case.draw(random.Random(seed)) for seed in (1, 2)]
        assert drawn[0] != drawn[1]
        for rows, *sides in drawn:
            for lanes in filter(None, sides):
                held = sorted(interval for lane in lanes for interval in lane)
                assert sum(b - a for a, b in held) == rows
                assert len({sum(b - a for a, b in lane) for lane in lanes}) > 1


def test_the_time_target_is_for_large_tensors_without_sums_that_are_split(load):
    scenarios = load("benchmarks.boundary.scenarios")
    by_name = {s.name: s.directions for s in (*scenarios.large(), *scenarios.small())}
    assert all(t.bytes == 16 * 2**20 for s in scenarios.large() for t in s.directions)
    for name, (forward, _) in by_name.items():
        none = "Partial" in name or "all replicated" in name or "-> replicated" in name or name.startswith("small")
        assert forward.has_target == (not none), name
    assert not by_name["Partial TP4 -> disjoint DP4"][1].has_target  # the backward ends on every rank
    assert by_name["disjoint DP4 -> TP4, all replicated"][1].has_target


def test_plans_out_of_the_llm_move_the_fewest_bytes(load):
    for case in load("benchmarks.boundary.out_of_llm").CASES:
        shape, src, dst = case.layouts()
        plan = plan_transfer(shape, src, dst)
        for way, ends in ((plan, (src, dst)), (plan.transpose(), (dst.gradient(), src.gradient()))):
            assert way.bytes_moved(4) == minimal_bytes(shape, *ends, 4) > 0, case.name


def test_a_round_lasts_from_the_start_to_the_last_end(load):
    measure = load("benchmarks.boundary.measure")
    records = [measure.Record({"planned": [(1.0, 1.5), (3.0, 3.1)]}, {"planned": [0.5, 0.25]}, 0, "p2p", 1)]
    records += [measure.Record({"planned": [(1.0, 1.25), (3.0, 3.5)]}, {"planned": [0.25, 0.5]}, 0, "p2p", 1)]
    assert [measure.duration(records, "planned", i) for i in range(2)] == [0.5, 0.5]
    assert [measure.cpu_seconds(records, "planned", i) for i in range(2)] == [0.75, 0.75]


def test_convergence_reports_the_largest_differences(load, monkeypatch):
    convergence = load("benchmarks.convergence")
    accuracy = {"digits_single": 0.95, "digits": 0.94, "digits_colocated": 0.97, "digits_overlapping": 0.95}

    def train(name, folder, steps):
        losses = [2.0, 1.0 + 0.25 * (name == "digits"), 0.5]
        return {"losses": losses, "answer_accuracy": accuracy[name], "steps": 3, "train_seconds": 1.0}

    monkeypatch.setattr(convergence, "train", train)
    result = convergence.run(options(convergence, "--steps", "3"))
    assert result["max_loss_difference"] == 0.25
    assert result["max_accuracy_difference"] == pytest.approx(0.02)
    assert result["runs"].keys() == accuracy.keys()
    assert "digits_overlapping" in convergence.table(result)


def test_drawing_reports_the_worst_seed_and_the_largest_difference_of_any_loss(load, monkeypatch, tmp_path):
    drawing = load("benchmarks.drawing")

    def train(name, folder, steps, *keys):
        assert (name, steps) == ("digits_draw", None)
        folder.mkdir(parents=True)
        other = "--training.steps=100" in keys
        assert other == ("--parallelism.drawer.tensor_parallel_degree=2" in keys)
        losses = {"llm": 1.0, "drawer": 2.0 + 0.5 * other}
        lines = [json.dumps({"loss": 3.0, "losses": losses})] * (100 if other else 150) + ['{"validation": {}}']
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        accuracy = 0.95 - 0.01 * int(keys[0].removeprefix("--debug.seed="))
        (folder / "summary.json").write_text(json.dumps({"drawn_accuracy": accuracy, "drawn": 40}))
        return {"answer_accuracy": accuracy + 0.03, "questions": 60, "steps": 150, "seconds": 1.0}

    monkeypatch.setattr(drawing.convergence, "train", train)
    result = drawing.run(options(drawing, "--seeds", "0", "1", "--folder", str(tmp_path)))
    assert (result["min_drawn_accuracy"], result["min_answer_accuracy"]) == (0.94, pytest.approx(0.97))
    assert result["loss_difference"] == {"total": 0, "llm": 0, "drawer": 0.5}
    assert result["max_loss_difference"] == 0.5
    assert result["judge_accuracy"] == pytest.approx(0.971, abs=5e-4)
    assert "seed 1" in drawing.table(result)


@pytest.mark.exhaustive
def test_boundary_bytes_are_the_bound(load, young_heap):
    boundary = load("benchmarks.boundary")
    args = options(boundary, "--size", "small", "--rounds", "1", "--plan-ranks", "32", "--plan-steps", "1")
    result = boundary.run(args)
    assert result["max_bytes_over_bound"] == result["min_bytes_over_bound"] == 1.0
    assert [e["bytes"] for e in result["scenarios"]] == [e["bound"] for e in result["scenarios"]]
    assert {e["direction"] for e in result["scenarios"]} == {"forward", "backward"}
    assert result["plan_ms_32"] == max(t["ms"] for t in result["plan_cases"]["32"].values())
    assert result["median_time_ratio_vs_bare"] is None
    compared = [e["time_ratio_vs_bare"] for e in result["scenarios"] if not e["sums"]]
    assert result["small_time_ratio_vs_bare"] == max(compared)
    assert all(e["messages"] for e in result["scenarios"])
    assert result["link_costs"].keys() >= {"message_us", "collective_us", "copy_us_per_mb"}
    json.dumps(result, allow_nan=False)
    assert "small ragged" in boundary.table(result)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_large_boundaries_are_judged_by_time(load):
    boundary = load("benchmarks.boundary")
    args = options(boundary, "--size", "large", "--only", "strided", "--rounds", "1", "--plan-ranks")
    result = boundary.run(args)
    ratios = [e["time_ratio_vs_gather"] for e in result["scenarios"] if e["has_target"]]
    assert len(ratios) == 2
    assert result["max_time_ratio_vs_gather"] == max(ratios)
    bare = [e["time_ratio_vs_bare"] for e in result["scenarios"]]
    assert result["max_time_ratio_vs_bare"] == max(bare) > 0
    assert result["median_time_ratio_vs_bare"] == pytest.approx(sum(bare) / 2, abs=1e-3)
    assert result["max_bytes_over_bound"] == 1.0


@pytest.mark.exhaustive
def test_schedules_are_predicted_and_measured(load):
    schedule = load("benchmarks.schedule")
    args = options(
        schedule,
        *("--only", "three_phase", "--width", "16", "--microbatches", "3", "--microbatch", "2"),
        *("--fit", "1", "4", "--rounds", "1", "--seconds", "0"),
    )
    result = schedule.run(args)
    assert [c["name"] for c in result["configurations"]] == ["three_phase"]
    for case in result["configurations"]:
        assert case["error"] == pytest.approx(abs(case["predicted_ms"] / case["measured_ms"] - 1))
        assert 0 < case["measured_bubbles"] < 1
        assert case["bubbles_of_steps"] == [case["measured_bubbles"]] == [case["median_bubbles"]]  # there is one step
        assert case["bubble_error"] == case["predicted_bubbles"] - case["measured_bubbles"]
        predicted, measured = zip(*case["bubbles_by_class"].values(), strict=True)
        assert sum(predicted) == pytest.approx(case["predicted_bubbles"])
        assert sum(measured) == pytest.approx(case["measured_bubbles"])
        assert 0 <= case["background_load"] <= 1
    assert result["max_bubble_error"] == max(abs(c["bubble_error"]) for c in result["configurations"])
    assert type(result["quiet"]) is bool
    assert result["max_prediction_error"] == max(c["error"] for c in result["configurations"])
    json.dumps(result, allow_nan=False)
    assert all(case["busy_slowdown"] >= 1 for case in result["configurations"])
    assert "three_phase" in schedule.table(result)


def test_a_schedule_is_not_predicted_from_its_own_shape(load):
    schedule = load("benchmarks.schedule")
    with pytest.raises(SystemExit, match="must not hold"):
        schedule.run(options(schedule, "--fit", "2", "4"))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_frozen_aware_and_blind_cuts_differ(load, monkeypatch):
    frozen = load("benchmarks.frozen")
    monkeypatch.setattr(frozen, "simulated", list)
    # What two busy cores do to each other is measured, and on a loaded machine may be anything: here it is given.
    monkeypatch.setattr(frozen, "busy_slowdown", lambda rounds, **_: (1.0, 1.0 + 0.1 * bool(list(rounds))))
    result = frozen.run(options(frozen, "--steps", "1", "--width", "16", "--microbatches", "6"))
    assert result["cuts"]["blind"][0] == [layer for layer in result["cuts"]["aware"][0] if "vision/" in layer]
    assert result["speedup_theory"] > 1
    assert result["busy_slowdown"] == 1.1
    assert 1 < result["speedup_expected"] < result["speedup_theory"]
    assert result["speedup_over_expected"] == result["speedup_measured"] / result["speedup_expected"] > 0
    json.dumps(result, allow_nan=False)
    assert "theory" in frozen.table(result)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_filled_bubbles_are_measured_and_predicted(load):
    bubble = load("benchmarks.bubble")
    sizes = ("--width", "16", "--layers", "2", "--vision-layers", "1", "--microbatches", "2", "--microbatch", "2")
    result = bubble.run(options(bubble, *sizes, "--fit", "1", "3", "--rounds", "2", "--seconds", "0"))
    assert len(result["ratios"]) == 2
    policies = [result[policy] for policy in bubble.POLICIES]
    assert result["speedup_predicted"] == policies[0]["predicted_ms"] / policies[1]["predicted_ms"]
    assert all(each["measured_ms"] > 0 < each["predicted_alone_ms"] <= each["predicted_ms"] for each in policies)
    assert "speed-up" in bubble.table(result)
    json.dumps(result, allow_nan=False)


@pytest.mark.exhaustive
def test_gaps_are_lent_and_what_they_gain_is_predicted(load):
    gaps = load("benchmarks.gaps")
    result = gaps.run(options(gaps, "--rounds", "1", "--microbatches", "2", "--layers", "1", "--width", "32"))
    assert {"gain_5ms", "gain_2ms", "lent_share", "predicted_over_measured", "empty_overhead"} <= result.keys()
    assert 0 < result["lent_share"] <= 1
    assert all(of["gap_time"] > 0 < of["hideable"] and of["pieces_ms"] > 0 for of in result["gaps"].values())
    assert "gaps of 5 ms: gain" in gaps.table(result)


@pytest.mark.exhaustive
def test_stragglers_are_measured_and_predicted(load):
    straggler = load("benchmarks.straggler")
    regret = ("--regret-batches", "2", "--regret-repetitions", "2")
    sizes = ("--width", "32", "--vision-layers", "1", "--llm-layers", "1", "--microbatches", "6")
    result = straggler.run(options(straggler, *sizes, "--rounds", "2", "--seconds", "0", *regret))
    for suffix in ("", "_fixed"):
        assert len(result[f"ratios{suffix}"]) == len(result[f"predicted_ratios{suffix}"]) == 2
        assert result[f"measured_ratio{suffix}"] > 0 < result[f"predicted_ratio{suffix}"]
        assert 0 < result[f"planning_share{suffix}"] < 1
    assert "auto, fixed" in straggler.table(result)
    assert set(result["regret_ms"]) == {"auto", *load("benchmarks.straggler.regret").SINGLE}
    assert -0.9 < result["auto_regret_measured"] < 9
    assert len(result["regret_of_batches"]) == 2
    json.dumps(result, allow_nan=False)


@pytest.mark.exhaustive
def test_held_out_errors_of_a_profile(load):
    """E1."""
    profile = load("benchmarks.profile")
    result = profile.run(options(profile, "--seconds", "0", "--keys", "training.local_batch_size=4"))
    assert 0 < result["mean"] < result["worst"]
    assert 0 < result["collectives_mean"] <= result["collectives_worst"]
    assert all(errors["count"] > 3 for each in result["recipes"].values() for errors in each.values())
    assert profile.table(result).count("%") == 8
    json.dumps(result, allow_nan=False)


def test_a_regret_is_judged_by_other_repetitions_than_those_that_choose(load):
    regret = load("benchmarks.straggler.regret").regret
    assert regret([[1.0] * 4, [2.0] * 4, [0.8] * 4]) == pytest.approx(0.25)
    by_chance = [[1.0] * 4, [0.5, 1.5] * 2, [1.5, 0.5] * 2]  # whoever seems best by one half is worst by the other
    assert regret(by_chance) == pytest.approx(1 / 1.5 - 1)


def test_charts_are_as_long_as_their_law_divided(load):
    source = load("benchmarks.straggler.source")
    rows = load("benchmarks.balance.laws").LAWS["chart-4k"](4096, np.random.default_rng(0), 0.0)
    charts = source.Charts("chart-4k", smaller=6.0)
    for index in (0, 17, 4000):
        meta, sample = charts.meta(index), charts.load(index)
        _, height, width = meta.media[0].shape
        assert height * width / 16 == pytest.approx(rows["vision"][0][index] / 6, abs=45)
        assert meta.tokens - 1 == pytest.approx((rows["llm"][0] - rows["vision"][0] // 4)[index] / 6, abs=4)
        assert (sample.tokens == charts.placeholders["image"]).sum() == 1
        assert sample.media["image"][0].shape == meta.media[0].shape
        assert not charts.load(index, ()).media


def test_a_machine_is_quiet_if_plain_code_has_its_core_and_always_takes_as_long(load):
    """What it takes may differ from rank to rank, and between alone and together."""
    quiet = load("benchmarks.busy").Quiet
    alone, together = [0.98, 0.99, 1.0, 1.01, 1.02], [2.04, 2.02, 2.0, 1.98, 1.96]
    assert quiet.of([alone, together], [0.0, 0.02])
    assert quiet.of([alone, together], [0.0, 0.02]).load == 0.01
    assert quiet.of([alone, together], [0.0] * 3).noise == pytest.approx(0.02)
    assert not quiet.of([alone, together], [0.0, 0.2]), "something else had the core"
    assert not quiet.of([[0.8, 1.3, 1.0, 0.9, 1.2]] * 2, [0.0]), "times scatter"
    assert quiet.of([[*alone, 3.0], together], [0.0]), "one bad moment does not move a median"


def test_time_without_the_core_is_no_time_of_the_plain_code(load, monkeypatch):
    """The clock goes on for 4 s, in which the process runs for 3."""
    busy = load("benchmarks.busy")
    clocks = {"wall": 0.0, "own": 0.0}

    def work():
        clocks["wall"], clocks["own"] = clocks["wall"] + 4.0, clocks["own"] + 3.0

    monkeypatch.setattr(busy.time, "perf_counter", lambda: clocks["wall"])
    monkeypatch.setattr(busy.time, "process_time", lambda: clocks["own"])
    meter = busy.BusyMeter(work, 8.0)
    assert meter.kept_off == [], "the first turn warms up"
    monkeypatch.setattr(busy.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(busy.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(busy.dist, "barrier", lambda: None)
    meter.round()
    assert (meter.alone, meter.together, meter.kept_off) == ([4.0], [4.0], [0.25, 0.25])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_busy_ranks_are_measured_by_plain_code(load):
    busy = load("benchmarks.busy")
    result = busy.run(options(busy, "--rounds", "1", "--seconds", "0", "--width", "16", "--layers", "1"))
    assert len(result["ranks"]) == len(result["busy_slowdown"]) == 2
    assert result["busy_slowdown"][0] == 1.0 <= result["busy_slowdown"][1]
    assert busy.table(result).startswith("busy_slowdown = [1.0, ")


def test_what_busy_ranks_measured_becomes_a_slowdown_and_costs_alone(load):
    busy = load("benchmarks.busy")
    assert busy.busy_slowdown([([1.0, 3.0], [2.0, 3.0]), ([1.0], [1.05])]) == pytest.approx((1.0, 1.15))
    assert busy.busy_slowdown([([1.0], [0.9])] * 3) == (1.0, 1.0, 1.0)
    waiting = busy.busy_slowdown([([1.0], [1.0, 1.4]), ([2.0], [2.6, 2.0])], waiting=True)
    assert waiting == pytest.approx((1.0, 1.35))  # the slowest of each turn: 1.3 and 1.4
    stage = Stage("llm")
    costs = busy.apart(StepCosts({(stage, 0): StageCost(2.0, 1.0, 3.0, activation_bytes=7)}), (1.0, 2.0))
    assert costs == StepCosts({(stage, 0): StageCost(1.0, 0.5, 1.5, activation_bytes=7)}, busy_slowdown=(1.0, 2.0))
    assert busy.seconds_together([3.0, 1.0], (1.0, 1.5)) == 1.5 + 2
    assert busy.seconds_together([3.0, 1.0, 2.0], (1.0, 1.5)) == 1.5 + 1.5 + 1


def test_simulated_pairs_gain_from_knowing_what_is_frozen(load):
    pairs = load("benchmarks.frozen.pairs").simulated()
    assert {p["llm"] for p in pairs} == {"trained", "frozen"}
    for pair in pairs:
        assert pair["speedup"] > 1
        for cut in pair["layers_per_stage"].values():
            assert sum(map(len, cut.values())) == 12  # stages of two ranks


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="bytes read are counted by Linux")
def test_the_loader_benchmark_reads_what_it_needs(load):
    module = load("benchmarks.loader")
    result = module.run(options(module, "--images", "48", "--turn", "2", "--batch", "4", "--passes", "1"))
    assert result["turns"] == 5
    assert result["samples_per_s"] > 0 < result["dataloader_samples_per_s"]
    assert 0.99 < result["bytes_over_needed"] <= 1.05


def test_the_machine_file_has_what_was_measured(load):
    # The efficiency of machines/h100.toml is that of the products kept in tools/results, fitted again.
    kept = json.loads((TOOLS / "results" / "rates.json").read_text(encoding="utf-8"))
    machine = load_machine("h100")
    assert machine.memory_bandwidth == pytest.approx(kept["memory_bandwidth"], rel=0.01)
    large = [(tuple(each["shape"]), each["s"]) for each in kept["products"] if each["shape"][0] >= 4096]
    fitted, error = load("benchmarks.rates").fit_efficiency(
        large, kept["memory_bandwidth"], machine.peak("bfloat16"), machine.operation_overhead
    )
    assert fitted == machine.efficiency == kept["efficiency"]
    assert error < 0.1


def test_products_that_reach_a_share_exactly_are_fitted_by_it(load):
    def seconds(rows, inputs, outputs):
        return 1e-6 + 2 * rows * inputs * outputs / 0.37e12 + 2 * (rows * (inputs + outputs) + inputs * outputs) / 1e9

    shapes = [(64, 32, 16), (128, 64, 64), (512, 8, 256)]
    share, error = load("benchmarks.rates").fit_efficiency([(s, seconds(*s)) for s in shapes], 1e9, 1e12, 1e-6)
    assert share == 0.37
    assert error == pytest.approx(0, abs=1e-12)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rates_are_measured_on_a_cpu_in_small(load):
    rates = load("benchmarks.rates")
    result = rates.run(options(rates, "--device", "cpu", "--peak", "1e11"))
    assert len(result["products"]) == len(rates.ROWS) * len(rates.SIZES)
    assert 0 < result["efficiency"] <= 1
    assert "efficiency" in rates.table(result)


def test_without_a_gpu_the_tools_for_one_say_so(load, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["nccl_recipes", "--json"])
    assert load("nccl_recipes").main() == 0
    assert json.loads(capsys.readouterr().out) == {"gpu": None}
    with pytest.raises(SystemExit, match="no GPU"):
        load("benchmarks.rates").run(options(load("benchmarks.rates")))


def test_checkpoints_are_timed_by_their_slowest_rank(load):
    def rank(**seconds):
        names = ("steps none", "steps async", "steps sync", "blocked async", "blocked sync", "torch.save")
        loads = [f"{name}{where}" for name in ("torch.load", "load") for where in ("", " from cache")]
        given = {name: [1.0, 1.0] for name in (*names, "torch.save to cache", *loads)}
        return {"seconds": given | {name.replace("_", " "): values for name, values in seconds.items()}, "bytes": 5}

    found = load("benchmarks.checkpoint").result(
        [rank(steps_async=[1.25, 1.0], blocked_sync=[4.0, 2.0]), rank(steps_async=[1.0, 1.5], load=[2.0, 2.0])]
    )
    assert (found["async_overhead"], found["blocked_share"], found["save_ratio"]) == (0.375, 0.375, 0.375)
    assert (found["load_ratio"], found["bytes"], found["ranks"]) == (0.5, 10, 2)
    assert "blocked_share" in load("benchmarks.checkpoint").table(found)


def test_relayouts_are_counted_from_intervals_and_timed_by_their_slowest_rank(load):
    bench = load("benchmarks.relayout")
    rows, columns = {"w": ((4, 6), 4, (((0, 2),), ((0, 6),)))}, {"w": ((4, 6), 4, (((0, 4),), ((0, 3),)))}
    assert bench.lacking(rows, columns) == 4 * (4 * 3 - 2 * 3)
    assert bench.lacking({}, columns) == 4 * 4 * 3
    rank = {"before": rows, "after": columns, "bytes": (48, 48), "received": 24, "peak": 1.1, "peak_resident": 1.2}
    ranks = [rank | {"save_s": 1.0, "relayout_s": 0.5}, rank | {"save_s": 2.0, "relayout_s": 0.4}]
    found = bench.result([{"way": "a -> b", **bench.way(ranks), "start_and_load_s": 3.0}])
    assert (found["bytes_over_bound"], found["peak"], found["time_share"]) == (1.0, 1.1, 0.1)
    assert "time_share" in bench.table(found)
