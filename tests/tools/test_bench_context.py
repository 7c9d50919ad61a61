"""The context benchmark counts what it promises; the assignments themselves are tested in tests/context."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_family_and_policy_is_measured_and_the_targets_hold(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    context = importlib.import_module("benchmarks.context")
    parser = argparse.ArgumentParser()
    context.add_arguments(parser)
    result = context.run(parser.parse_args(["--rounds", "1", "--large-rounds", "0"]))
    assert len(result["families"]) == 8
    assert all(m.keys() == {"balanced", "contiguous", "lpt", "zigzag"} for m in result["families"].values())
    assert result["worst_tile_imbalance"] <= 1.005
    assert result["worst_token_imbalance"] <= 1.02
    assert result["mean_runs"] <= 5
    assert result["kv_over_lpt_image_bits"] <= 0.8
    assert result["kv_over_lpt_packed"] <= 0.25
    assert result["blockwise_rows"] <= 1.01
    json.dumps(result, allow_nan=False)
    assert "packed_documents" in context.table(result)
