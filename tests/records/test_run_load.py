"""The load of a run's steps: means, text and curves of what its metrics hold."""

import json

import pytest

from hetmesh.balance.imbalance import BatchLoad, ModuleLoad
from hetmesh.cli import main
from hetmesh.records.metrics import StepLoad, StepMetrics, flat
from hetmesh.records.run_view import read_run


def metrics(step):
    drawn = BatchLoad({"vision": ModuleLoad(2.0 + step, 0.5, 0.0), "llm": ModuleLoad(1.5, 0.25, 0.4)}, 0)
    even = BatchLoad({"vision": ModuleLoad(1.1, 0.125, 0.0), "llm": ModuleLoad(1.0, 0.0, 0.3)}, 2 * step)
    return StepMetrics(step, 2.0, 1.0, 0.1, 5.0, 6.0, 7.0, load=StepLoad(drawn, even) if step % 2 else None)


def test_load_goes_from_metrics_to_the_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    records = [metrics(step).record() for step in range(1, 6)]
    assert ["load" in record for record in records] == [True, False, True, False, True]
    assert flat(records[0])["load/vision/drawn_max_over_mean"] == 3.0
    assert flat(records[0])["deferred_samples"] == 2
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = read_run(tmp_path).load
    assert found.steps == (1, 3, 5)
    means = found.means()
    assert means["deferred_samples"] == 6
    assert means["load"]["vision"] == pytest.approx(
        {
            "max_over_mean": 1.1,
            "drawn_max_over_mean": 5.0,
            "std_over_mean": 0.125,
            "drawn_std_over_mean": 0.5,
            "padding": 0.0,
            "drawn_padding": 0.0,
        }
    )
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert ["vision", "1.100", "5.000", "0.125", "0.500", "0.0%", "0.0%"] in map(str.split, out.splitlines())
    assert "deferred samples per step: 6" in out
    assert "Line chart, " in (tmp_path / "report.html").read_text()
    assert means["load"]["llm"]["padding"] == pytest.approx(0.3)
