"""The list of a first hour on GPUs: it runs to its end whatever a check does, and says what failed and why."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def load(monkeypatch):
    """`load("gpu_check")`: a module of tools/."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.fixture
def place(load):
    return load("gpu_checks.found").Place("cpu", steps=2)


def test_the_list_names_every_check_and_what_it_is(load, capsys):
    assert load("gpu_check").main(["--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    package = load("gpu_checks")
    assert list(listed) == list(package.CHECKS)
    assert all(len(text.split()) > 5 for text in listed.values())
    texts = [(TOOLS / "gpu_checks" / f"{name}.py").read_text(encoding="utf-8") for name in listed]
    assert all("\ndef run(place: Place) -> Found:\n" in text for text in texts)


def test_a_check_fails_by_a_figure_above_its_bound_or_without_a_number(load):
    found, row = load("gpu_checks.found").Found, load("gpu_checks.found").Row
    assert row.of("x", found({"error": 0.1, "count": 0}, {"error": 0.1, "count": 0})).status == "passed"
    above = row.of("x", found({"error": 0.2, "count": 0}, {"error": 0.1, "count": 0}))
    assert (above.status, above.reason) == ("failed", "error is 0.2, at most 0.1 is allowed")
    for value in (float("nan"), None, "no"):
        assert row.of("x", found({"error": value}, {"error": 1.0})).status == "failed"
    assert row.of("x", found({}, {"error": 1.0})).reason == "error is None, which is no number"


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("import os; os.abort()", "failed", "the process ended with signal SIGABRT"),
        ("import sys; sys.exit('no such thing')", "failed", "exit status 1; it printed: no such thing"),
        pytest.param(
            "import time; print('begun', flush=True); time.sleep(600)",
            *("failed", "no end within 5 s"),
            marks=pytest.mark.slow,
        ),
        ("import json, sys; json.dump({'name': 'x', 'status': 'skipped'}, open(sys.argv[-1], 'w'))", "skipped", ""),
    ],
)
def test_a_crash_or_a_hang_is_one_row_and_no_process_stays(load, monkeypatch, place, code, status, reason):
    runner, told = load("gpu_checks.runner"), []
    monkeypatch.setattr(runner, "COMMAND", (sys.executable, "-c", code))
    row = runner.run_check("x", place, 5.0, told.append)
    assert row.status == status
    assert reason in row.reason
    assert told == (["    begun"] if "begun" in code else [])


def test_the_result_counts_and_fails_with_a_status(load, monkeypatch, capsys):
    tool, row = load("gpu_check"), load("gpu_checks.found").Row
    statuses = {"machine": "passed", "flex": "failed"}
    monkeypatch.setattr(tool, "run_check", lambda name, *given: row(name, statuses[name], seconds=1.0))
    arguments = ["--device", "cpu", "--only", "machine", "--json"]
    assert tool.main(arguments) == 0
    assert tool.main([*arguments, "--only", "flex"]) == 1
    text = capsys.readouterr()
    result = json.loads(text.out[text.out.rindex('{\n "device"') :])
    assert (result["passed"], result["failed"], result["skipped"]) == (1, 1, 0)
    assert [each["status"] for each in result["checks"]] == ["passed", "failed"]
    assert "2 of 2: flex\nFAILED  flex: failed" in text.err


def test_without_a_gpu_all_is_skipped_and_says_why(load, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert load("gpu_check").main(["--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gpu"] is None
    assert result["skipped"] == len(result["checks"]) > 5
    assert all("no CUDA device" in each["reason"] for each in result["checks"])


def test_cheap_checks_on_a_cpu(load, place):
    check = load("gpu_checks.one").check
    machine = check("machine", place)
    assert machine.status == "passed"
    assert machine.figures["torch"] == torch.__version__
    assert "GPUs" in machine.left_out
    assert check("recipes", place).status == "skipped"


def test_ranks_share_a_gpu_as_if_they_were_on_different_hosts(load):
    environment = load("gpu_checks.ranks").environment
    shared, own, cpu = (environment(3, 4, 1, gpus) for gpus in (2, 4, 0))
    assert (shared["LOCAL_RANK"], shared["LOCAL_WORLD_SIZE"], shared["NCCL_HOSTID"]) == ("1", "1", "rank3")
    assert (own["LOCAL_RANK"], own["LOCAL_WORLD_SIZE"]) == ("3", "4")
    assert "NCCL_HOSTID" not in own | cpu
    assert "NCCL_P2P_DISABLE" not in own | cpu


def event(name, cat, at, tid=1, dur=1.0, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": at, "dur": dur, "tid": tid, "args": args}


# As Kineto writes it: 1 is the thread that trains, 2 that of backwards on the device, 3 a watchdog.
TRACE = [
    {"ph": "M", "name": "process_name", "ts": 0, "tid": 1},
    event("actions", "user_annotation", 100.0, dur=100.0),
    event("actions", "gpu_user_annotation", 150.0, tid=7, dur=100.0),
    event("/x/src/hetmesh/runtime/step_runner.py(90): _forward", "python_function", 105.0, dur=20.0),
    event("/x/transformers/masking.py(4): find", "python_function", 106.0, dur=10.0),
    event("<built-in method item>", "python_function", 107.0, dur=5.0),
    event("aten::_local_scalar_dense", "cpu_op", 108.0, dur=3.0),
    event("cudaMemcpyAsync", "cuda_runtime", 109.0, correlation=1),
    event("cudaStreamSynchronize", "cuda_runtime", 110.0, correlation=2),
    event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 160.0, tid=7, correlation=1),
    event("cudaMemcpyAsync", "cuda_runtime", 120.0, correlation=3),
    event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 161.0, tid=7, correlation=3),
    event("cudaLaunchKernel", "cuda_runtime", 121.0, correlation=4),
    event("transformers/inputs.py(7): move", "python_function", 126.0, dur=2.0),
    event("cudaMemcpyAsync", "cuda_runtime", 127.0, correlation=9),
    event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 162.0, tid=7, correlation=9),
    event("autograd::engine::evaluate_function: IndexBackward0", "cpu_op", 130.0, tid=2, dur=5.0),
    event("cudaStreamSynchronize", "cuda_runtime", 131.0, tid=2, correlation=5),
    event("cudaEventSynchronize", "cuda_runtime", 140.0, tid=3, correlation=6),
    event("cudaMalloc", "cuda_runtime", 141.0, correlation=7),
    event("cudaStreamSynchronize", "cuda_runtime", 201.0, correlation=8),
]


def test_waits_are_found_in_a_trace_and_named_by_what_was_running(load):
    trace = load("gpu_checks.trace")
    span = trace.Span.of(TRACE, "actions")
    place = "hetmesh/runtime/step_runner.py(90): _forward"
    found = [(b.call, b.where, b.count) for b in trace.blocks(TRACE, span)]
    assert found == [  # a read's copy and wait are one
        ("cudaMemcpyAsync of memory that is not pinned", "transformers/inputs.py(7): move", 1),
        ("cudaStreamSynchronize", "backward of IndexBackward0", 1),
        ("cudaStreamSynchronize", place, 1),
    ]
    assert [(b.call, b.where) for b in trace.reads(TRACE, span)] == [("aten::_local_scalar_dense", place)]
    assert (trace.prepared(TRACE, span), trace.launches(TRACE, span)) == (1, 1)
    with pytest.raises(ValueError, match="0 spans 'other'"):
        trace.Span.of(TRACE, "other")


def test_attention_that_is_wrong_is_seen(load):
    from hetmesh.context import causal

    flex = load("gpu_checks.flex")
    case = flex.Case(flex.Heads(4, 2, 12), causal(390), None, torch.device("cpu"), True)
    assert case.error(flex.CPU, torch.float32) < flex.FLOAT32

    def shifted(saved, kv, work, terms, dq, dkv):
        flex.CPU.backward(saved, kv, work, terms, dq, dkv)
        dkv[0] *= 1.01

    assert case.error(flex.Kernel(flex.CPU.forward, shifted), torch.float32) > 1e-4


@pytest.mark.exhaustive
def test_a_check_with_ranks_in_a_process_of_its_own(load, capsys):
    assert load("gpu_check").main(["--device", "cpu", "--only", "transfers", "--steps", "1", "--json"]) == 0
    told = capsys.readouterr()
    (row,) = json.loads(told.out)["checks"]
    assert (row["status"], row["figures"]["wrong_values"], row["at_most"]) == ("passed", 0, {"wrong_values": 0})
    assert len(row["figures"]["transfers"]) == 8
    assert "large: colocated, shuffled rows: " in told.err


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_whole_list(load, capsys, device):
    assert load("gpu_check").main(["--device", device, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["failed"] == 0
    assert result["passed"] >= {"cpu": 7, "fake": 2}[device]
    assert all(each["reason"] for each in result["checks"] if each["status"] == "skipped")
