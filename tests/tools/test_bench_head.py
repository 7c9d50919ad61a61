"""The benchmark of heads by chunks: peaks are what sizes say, and a run of a small one has its keys."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def small_run():
    """In a process of its own (`apart`)."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(TOOLS))
        bench = importlib.import_module("benchmarks.head")
        patched.setattr(bench, "VOCABULARY", 4096)
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        result = bench.run(parser.parse_args(["--rounds", "1", "--targets", "64", "--features", "8"]))
        return result, bench.table(result)


@pytest.mark.exhaustive
def test_a_small_run_has_the_keys(apart):
    result, table = apart(small_run)
    assert result["peak_ratio"] == result["peak_bytes"]["chunks"] / result["peak_bytes"]["whole"]
    assert result["step_ratio"] == max(result["step_ratios"].values())
    assert "trained" in table
    json.dumps(result, allow_nan=False)
