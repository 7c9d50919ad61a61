"""What a run reports: FLOPs, MFU, imbalance, memory, bytes and waits; log lines; Weights & Biases."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.recipe.sections import Metrics
from hetmesh.records.metrics import LINE_WIDTH, Measured, StepCost, StepMetrics, amount, duration, flat
from hetmesh.records.reporter import Loggers, Reporter, require_wandb
from hetmesh.resolve.recipe_step_model import measure_peak
from hetmesh.resolve.resolved import resolve

RECIPES = Path(__file__).parents[2] / "recipes"
COST = StepCost({"vision": 3_000_000, "llm": 5_000_000_000}, {"vision": 0.01, "llm": 0.2}, 0.12, {"vision": 1.25})
DATA = {"bytes_read": 5_100_000, "bytes_needed": 5_000_000, "bytes_read_most": 3_000_000, "load_s": 0.5, "wait_s": 0.25}
DATA |= {"frames_decoded": 21, "frames_needed": 20}
MEASURED = Measured(
    2_000_000_000, 3, 4, {"vision->llm": {"forward": 1000, "backward": 500}}, {"vision->llm": 0.0123}, DATA
)
STEP = StepMetrics(10, 2.5, 0.75, 1e-3, 100.0, 2000.0, 0.64, COST, MEASURED)


def test_a_log_line_says_what_matters():
    line = "step 10/80  loss 2.5000  grad norm 0.750  lr 0.001  2000 tokens/s  0.64 s"
    assert STEP.line(80) == line
    assert STEP.line(80, 44.8) == f"{line}  ETA 0:45"


def test_verbose_shows_everything(tmp_path, capsys):
    lending = replace(MEASURED, lending={"gap_s": 0.4, "lent_s": 0.1})
    for verbose in (False, True):
        reporter = Reporter(tmp_path, 10, rank=0, keys=Metrics(verbose=verbose))
        reporter.step(replace(STEP, measured=lending))
        reporter.close()
    plain, verbose = capsys.readouterr().out.splitlines()
    assert verbose == plain + (
        "  samples_per_s 100  flops/vision 3 M  flops/llm 5 G  module_mfu/vision 0.01  module_mfu/llm 0.2  mfu 0.12  "
        "imbalance/vision 1.25  memory_bytes 2 G  active_ranks 3  allocated_ranks 4  "
        "boundary_bytes/vision->llm/forward 1 k  boundary_bytes/vision->llm/backward 500  wait_s/vision->llm 0.0123  "
        "data/bytes_read 5.1 M  data/bytes_needed 5 M  data/bytes_read_most 3 M  data/load_s 0.5  data/wait_s 0.25  "
        "data/frames_decoded 21  data/frames_needed 20  lending/gap_s 0.4  lending/lent_s 0.1"
    )


@given(
    step=st.integers(1, 10**8),
    loss=st.floats(),
    norm=st.floats(),
    lr=st.floats(0, 10),
    tokens=st.floats(0, 1e12),
    seconds=st.floats(1e-4, 1e5),
    left=st.none() | st.floats(0, 8e7),
    skipped=st.booleans(),
)
def test_a_log_line_has_at_most_120_characters(step, loss, norm, lr, tokens, seconds, left, skipped):
    """Whatever the numbers, not finite ones included; and usual ones show everything."""
    metrics = StepMetrics(step, loss, norm, lr, 1.0, tokens, seconds, COST, MEASURED, skipped)
    assert len(metrics.line(10**8, left)) <= LINE_WIDTH == 120
    large = StepMetrics(9_999_999, 9999.1234, 9999.123, 1.23e-05, 1.0, 98_765_432.1, 1234.5)
    assert large.line(10_000_000, 8e6).endswith("98765432 tokens/s  1.23e+03 s  ETA 92d 14:13")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05"), (200_000, "2d 7:33"), (86399, "23:59:59")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_records_keep_the_first_keys_first_and_leave_out_what_is_unknown():
    plain = StepMetrics(1, 2.0, 1.0, 0.1, 5.0, 6.0, 7.0)
    first = ["step", "loss", "grad_norm", "lr", "samples_per_s", "tokens_per_s", "time_s"]
    assert list(plain.record()) == first
    record = STEP.record()
    assert list(record)[:7] == first
    assert record["flops"] == {"vision": 3_000_000, "llm": 5_000_000_000}
    assert record["active_ranks"] == 3
    assert flat(record)["boundary_bytes/vision->llm/backward"] == 500
    assert flat(record)["data/bytes_needed"] == 5_000_000
    json.dumps(record)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 "), (999, "999 "), (999.9, "1 k"), (1_234_567, "1.23 M"), (3e18, "3 E")]
)
def test_amounts(value, text):
    assert amount(value) == text


def test_the_reporter_logs_every_nth_step_and_the_last(tmp_path, capsys):
    reporter = Reporter(tmp_path, 7, rank=0, keys=Metrics(log_freq=3))
    for step in range(1, 8):
        reporter.step(StepMetrics(step, 2.0, 1.0, 0.1, 5.0, 6.0, 7.0))
    reporter.close()
    assert [step for step in range(1, 8) if reporter.logs(step)] == [3, 6, 7]
    assert capsys.readouterr().out.count("loss") == 3
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 7


def test_other_ranks_report_nothing(tmp_path):
    reporter = Reporter(tmp_path / "run", 7, rank=1)
    reporter.step(STEP)
    reporter.close()
    assert not (tmp_path / "run").exists()


def test_wandb_that_is_not_installed_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="enable_wandb = true: wandb is not installed; pip install wandb"):
        require_wandb()
    with pytest.raises(RecipeError, match="enable_wandb"):
        Reporter(tmp_path, 7, rank=1, keys=Metrics(enable_wandb=True))


@pytest.mark.parametrize("key", [None, "secret"])
def test_wandb_without_a_key_stays_offline(tmp_path, monkeypatch, key):
    seen = {}

    class Logger:
        def __init__(self, folder, config):
            import os

            seen.update(folder=folder, config=config, mode=os.environ.get("WANDB_MODE"))

        def log(self, values, step):
            seen.update(values=values, step=step)

        def close(self):
            seen["closed"] = True

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setitem(sys.modules, "wandb", sys.modules[__name__])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("hetmesh._titan.wandb_logger", lambda: Logger)
    loggers = Loggers(tmp_path, Metrics(enable_wandb=True), config={"a": 1})
    loggers.log({"loss": 2.0}, 5)
    loggers.close()
    expected = None if key else "offline"
    assert seen == {
        "folder": str(tmp_path / "wandb"),
        "config": {"a": 1},
        "mode": expected,
        "values": {"loss": 2.0},
        "step": 5,
        "closed": True,
    }


def test_a_cpu_has_a_peak():
    import torch

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert 1e8 < measure_peak(dtype) < 1e14


def train(rank, folder, overrides):
    """On a worker: a short run; what its meter knows."""
    from hetmesh.boundary import World
    from hetmesh.training.trainer import Trainer

    common = ("--job.dump_folder", folder, "--validation.samples", "4", "--metrics.enable_tensorboard", "false")
    recipe = load_recipe(RECIPES / "digits_colocated.toml", (*common, *overrides))
    world = World.current()
    trainer = Trainer(resolve(recipe), world)
    trainer.run()
    return {"messages": len(world.log.messages), "peak": trainer.meter.peaks["llm"].flops, "ranks": world.size}


@pytest.mark.slow
def test_a_run_reports_costs_and_what_was_measured(pool4, tmp_path):
    given = ("--training.steps", "4", "--metrics.log_freq", "2", "--metrics.machine", str(tmp_path / "mine.toml"))
    given += ("--balance.policy", "two_dim")  # an LLM that pads would rather have samples of like length together
    (tmp_path / "mine.toml").write_text("[peak_flops]\nfloat32 = 1e10\n")
    results = pool4.run(train, str(tmp_path / "run"), given)
    assert all(result["peak"] == 1e10 for result in results)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    *records, evaluated = records
    assert set(evaluated) == {"step", "timestamp", "validation"}
    assert ["memory_bytes" in record for record in records] == [False, True, False, True]
    for record in records:
        assert set(record["flops"]) == set(record["imbalance"]) == {"vision", "projector", "llm"}
        assert all(value >= 1 for value in record["imbalance"].values())
        assert ("load" in record) == (record["step"] % 2 == 0)  # of the steps that are logged
        total = sum(record["flops"].values()) / (record["time_s"] * 4 * 1e10)
        assert record["mfu"] == pytest.approx(total)
        # all modules are on all ranks
        assert record["mfu"] == pytest.approx(sum(record["module_mfu"].values()))
    last = records[-1]
    vision, llm = last["load"]["vision"], last["load"]["llm"]  # four lanes of rows, two of tokens; one microbatch
    assert 1.2 < vision["drawn_max_over_mean"] > vision["max_over_mean"] >= 1
    assert vision["drawn_std_over_mean"] > 4 * vision["std_over_mean"]
    assert vision["padding"] == 0 < llm["padding"] < 0.9
    assert last["deferred_samples"] == 0
    assert (last["active_ranks"], last["allocated_ranks"]) == (4, 4)
    assert last["memory_bytes"] > 50e6
    (edge,) = (name for name in last["boundary_bytes"] if name.startswith("vision"))
    sizes = last["boundary_bytes"][edge]
    assert sizes["forward"] > 0
    assert sizes["backward"] == 0  # colocated: the LLM's lanes hold the gradients of the rows that they encoded
    assert last["wait_s"][edge] > 0
