"""The Optimus benchmark at one of its sizes, and that its kept run has what it promises."""

import importlib
import json
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def load(monkeypatch):
    """`load("benchmarks.optimus")`: a module of tools/."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.mark.slow
def test_o10_order_and_bounds_at_3072_gpus(load):
    models, layouts, filled = (load(f"benchmarks.optimus.{name}") for name in ("models", "layouts", "filled"))
    constants, dp = models.CALIBRATION, models.PUBLISHED[3072]["dp"]
    balanced = layouts.chain_seconds("mllm", dp, layouts.balanced_counts("even"), constants)
    assert balanced == pytest.approx(models.PUBLISHED[3072]["balanced_s"], rel=0.05)
    llm = layouts.chain_seconds("llm", dp, (1,) * 96, constants)
    plan = next(p for p in filled.plans(dp) if (p.pp, p.tp, p.microbatch) == (8, 4, 1))
    beside, coarse = (filled.fill(dp, plan, constants, gaps=gaps, refine=gaps) for gaps in (True, False))
    megatron = [layouts.chain_seconds("mllm", dp, counts, constants) for _, counts in layouts.megatron_counts()]
    assert min(megatron) >= balanced > coarse.seconds > beside.seconds > llm + beside.traffic
    assert beside.seconds < 1.03 * (llm + beside.traffic)
    assert 0 < beside.hidden < beside.work
    assert max(beside.peak, coarse.peak) <= filled.MEMORY


def test_baselines_hold_all_layers_and_the_kept_run_has_every_key(load):
    optimus, layouts = load("benchmarks.optimus"), load("benchmarks.optimus.layouts")
    for ties in optimus.TIES:
        counts = layouts.balanced_counts(ties)
        assert (len(counts), sum(counts)) == (96, 144)
    literal, rebalanced = (counts for _, counts in layouts.megatron_counts())
    assert literal == (60, *(12,) * 7)
    assert sum(rebalanced) == 144
    assert rebalanced[0] >= 48
    kept = json.loads((TOOLS / "results" / "optimus.json").read_text(encoding="utf-8"))
    assert {
        *("balanced_worst_error", "speedup_over_balanced", "speedup_bound", "share_of_bound", "hidden_share_16"),
        *("drift_worst", "rows"),
    } <= set(kept)
    assert "over balanced" in optimus.table(kept)
