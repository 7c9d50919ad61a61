"""The attention benchmark's deterministic part: bytes, and the prediction that its times stand beside."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

from hetmesh.context import assign
from support.mask_families import families

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def attention(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("benchmarks.attention")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["image_bits", pytest.param("causal", marks=pytest.mark.exhaustive)])
def test_memory_does_not_grow_with_ranks_at_fixed_local_tokens(attention, pool, name):
    peaks = []
    for ranks in (2, 8):
        mask = families(ranks * 1024)[name]
        peaks.append(max(pool(ranks).run(attention._peak, mask, assign(mask, ranks), ranks)))
    assert peaks[1] <= 1.2 * peaks[0], peaks


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_small_run_has_every_key(attention, monkeypatch):
    monkeypatch.setattr(attention, "RANKS", (2,))
    parser = argparse.ArgumentParser()
    attention.add_arguments(parser)
    sizes = ["--tokens", "2048", "--local-tokens", "512", "--hybrid-tokens", "512"]
    result = attention.run(parser.parse_args([*sizes, "--rounds", "1"]))
    assert result.keys() >= {"measured_ratio", "predicted_ratio", "cpu_ratio", "memory_growth"}
    assert min(result["hybrid_speedup"], result["hybrid_predicted"]) > 0
    assert result["hybrid"]["cuts"] > 0
    assert sum(result["hybrid"]["rows"]) == 512
    assert result["tiles_ratio"] > 1.05
    assert 1 <= result["predicted_ratio"] <= result["tiles_ratio"]
    assert result["busy_slowdown"] >= 1
    json.dumps(result, allow_nan=False)
    assert "contiguous" in attention.table(result)
