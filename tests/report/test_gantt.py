"""Pictures, traces and text of timelines: they hold what the timeline holds."""

import json

import pytest

from hetmesh.cli import main
from hetmesh.cost import StageCost, StepCosts
from hetmesh.errors import UsageError
from hetmesh.graph import Activation, ModuleGraph, ModuleSpec, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.records.run_view import read_run
from hetmesh.report.gantt import save_gantt
from hetmesh.report.timeline_text import bubble_table, gantt_text, save_trace, trace
from hetmesh.schedule import zero_bubble
from hetmesh.simulate import CLASSES, bubbles, simulate


@pytest.fixture
def timeline():
    """Zero bubble over two stages, four microbatches, forward 1 ms."""
    layers = ("a", "b")
    llm = ModuleSpec(
        "llm", MeshSpec.make(range(2), pp=2), layers, splits=(("a",), ("b",)), activation=Activation(1, True)
    )
    schedule = zero_bubble(stage_graph(ModuleGraph((llm,))), 4)
    costs = {(s, m): StageCost(1e-3, 1e-3, 1e-3) for s in schedule.stages.stages for m in range(4)}
    return simulate(schedule, StepCosts(costs))


def test_text_has_a_line_per_row_and_a_character_per_share(timeline):
    lines = gantt_text(timeline, 100).splitlines()
    assert lines[0].startswith("rank 0  llm.0")
    assert lines[1].startswith("rank 1  llm.1")
    assert "0" in lines[0]
    assert "w" in lines[1]
    assert "pp-cooldown" in bubble_table(timeline)
    assert bubble_table(timeline).splitlines()[0].split()[-2:] == ["in-layers", "peak"]  # not of TP alone
    for idle in bubbles(timeline):
        assert idle.compute + sum(getattr(idle, name) for name in CLASSES) == pytest.approx(timeline.makespan)


def test_a_trace_has_an_event_per_span_in_microseconds(timeline, tmp_path):
    events = [e for e in trace({"predicted": timeline})["traceEvents"] if e["ph"] == "X"]
    work = [e for e in events if e["tid"] == 0]
    assert len(work) + 2 == len(list(timeline.spans()))  # and two reductions, which run beside work
    assert {e["pid"] for e in work} == {0, 1}
    assert min(e["dur"] for e in work) == pytest.approx(1000)
    save_trace({"predicted": timeline}, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["displayTimeUnit"] == "ms"
    with pytest.raises(UsageError, match="cannot be written"):
        save_trace({"predicted": timeline}, tmp_path / "none" / "trace.json")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_of_two_timelines(timeline, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"step.{suffix}"
    save_gantt({"predicted": timeline, "measured": timeline}, path, "a step")
    assert path.stat().st_size > 5000
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        save_gantt({"predicted": timeline}, tmp_path / "step.gif")


def test_a_run_folder_is_read_and_what_is_missing_is_named(timeline, tmp_path, capsys):
    with pytest.raises(UsageError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.25}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert "1.25" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--trace", str(tmp_path / "t.json")]) == 2
    assert "[profiling] timeline_step has not come yet" in capsys.readouterr().err
    (tmp_path / "timeline.json").write_text(json.dumps({"step": 2, "measured": timeline.as_json()}))
    found = read_run(tmp_path)
    assert (found.step, list(found.timelines)) == (2, ["measured"])
    assert found.timelines["measured"].makespan == timeline.makespan


def test_timelines_that_do_not_hold_together_are_refused(timeline, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    wrong = [
        ("targets", ["llm.0"], "names a track, kind or target|is no target"),
        ("rows", [[0]], "differ in number"),
        ("holds", [["x.0"], ["llm.1"]], "'x.0', which is no target"),
        (
            "work",
            [column[1:] if i == 4 else column for i, column in enumerate(timeline.as_json()["work"])],
            "in length",
        ),
        ("makespan", float("nan"), "finite"),
        ("peak_bytes", ["x", 1], "not a timeline"),
    ]
    for key, value, message in wrong:
        told = json.dumps({"step": 1, "measured": timeline.as_json() | {key: value}})
        (tmp_path / "timeline.json").write_text(told)
        with pytest.raises(UsageError, match=rf"timeline\.json: cannot be read: .*({message})"):
            read_run(tmp_path)


@pytest.mark.parametrize("line", ["null", "3", "[]", "{"])
def test_metrics_that_are_no_object_are_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line)
    with pytest.raises(UsageError, match=r"metrics\.jsonl: cannot be read"):
        read_run(tmp_path)


def test_simulate_shows_a_recipe_s_step(capsys, tmp_path):
    machine = tmp_path / "machine.toml"
    machine.write_text("node_bandwidth = 1e9\n[peak_flops]\nfloat32 = 1e10\n")
    command = ["simulate", "recipes/digits_interleaved.toml", "--machine", str(machine)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "llm.1, llm.3" in out
    assert main([*command, "--parallelism.llm.pipeline_parallel_schedule", "1f1b"]) == 0
    assert "one step, schedule 1f1b: " in capsys.readouterr().out
