"""`bench.py cards`: tables are read or refused by row and column; predictions know nothing of what was measured."""

import csv
import json
import re
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
HEAD = (TOOLS / "benchmarks" / "cards" / "cards.csv").read_text(encoding="utf-8").splitlines()[1].split(",")
ROW = {
    **dict.fromkeys(HEAD, ""),
    **{"id": "a.pretrain", "model": "Qwen3-8B", "kind": "text", "params_total_b": "8", "params_active_b": "8"},
    **{"gpu": "H100", "gpus": "8", "dtype": "bf16", "tp": "2", "pp": "1", "cp": "1", "dp": "4", "fsdp": "zero1"},
    **{"micro_batch": "1", "global_batch": "16", "seq_len": "2048", "recompute": "none", "trained": "all"},
    **{"step_ms": "2000", "peak_memory_gib": "40"},
}


@pytest.fixture
def bench(monkeypatch):
    """`tools/bench.py`."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import bench

    return bench


@pytest.fixture
def predict(bench, tmp_path, capsys):
    """Exit status, and the output or the error, of a table of these rows: `ROW` with other cells."""

    def run(*rows, head=HEAD, line=""):
        path = tmp_path / "rows.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            file.write("# a source\n")
            table = csv.writer(file, lineterminator="\n")
            table.writerows([head, *([(ROW | cells).get(name, "9") for name in head] for cells in rows)])
            file.write(line)
        status = bench.main(["cards", "--rows", str(path), "--json"])
        found = capsys.readouterr()
        return status, json.loads(found.out) if status == 0 else found.err

    return run


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"gpus": "many"}, r"line 3 \(a.pretrain\), column gpus: 'many' is no whole number of at least 1"),
        ({"tp": "0"}, r"line 3 \(a.pretrain\), column tp: '0' is no whole number"),
        ({"step_ms": "-1"}, r"column step_ms: '-1' is no number above 0"),
        ({"peak_memory_gib": "nan"}, r"column peak_memory_gib: 'nan' is no number above 0"),
        ({"params_active_b": "9"}, r"column params_active_b: 9 is more than params_total_b, 8"),
        ({"global_batch": ""}, r"column global_batch: is empty"),
        ({"dp": "3"}, r"no row can be predicted: .*column dp: 8 GPUs are not TP 2 x PP 1 x CP 1 x DP 3"),
    ],
)
def test_a_malformed_row_is_refused_by_row_and_column(predict, cells, said):
    status, error = predict(cells)
    assert status == 2
    assert re.search(said, error)


def test_a_malformed_table_is_refused(predict):
    assert "columns ['gpus'] are missing" in predict({}, head=[name for name in HEAD if name != "gpus"])[1]
    assert "line 4: 2 cells for 31 columns" in predict({}, line="a,b\n")[1]
    assert "no row below the names" in predict()[1]


def test_what_cannot_be_modelled_is_left_out_by_name(predict):
    odd = (
        {"kind": "audio"},
        {"dtype": "fp8"},
        {"gpu": "TPU v5p"},
        {"trained": "llm+speech"},
        {"trained": "projector"},
        {"recompute": "some"},
        {"seq_len": ""},
        {"step_ms": ""},
        {"global_batch": "18"},
        {"ep": "16", "model": "gpt-oss-20b", "params_total_b": "21"},
        {"tp": "1", "pp": "64", "dp": "1", "gpus": "64"},
    )
    _, found = predict({}, *odd, head=[*HEAD, "speed"])
    assert found["rows_read"] == 1
    column, *rows = found["left_out"]
    assert column == "column speed"
    named = [re.search(r"line \d+ \(a.pretrain\)(?:[,:] column (\w+))?:", each) for each in rows]
    assert sorted(str(each[1]) for each in named) == sorted([*(next(iter(cells)) for cells in odd[:-1]), "None"])
    assert "64 pipeline stages for 39 layers" in rows[-1]


def test_other_models_and_kinds_are_built_and_said(predict):
    unknown = {"model": "Foo-30B", "params_total_b": "30", "params_active_b": "3"}
    _, found = predict(
        {"model": "Foo-8B", "peak_memory_gib": "", "step_ms": "", "tokens_per_s_per_gpu": "4000"},
        unknown | {"tp": "1", "dp": "8", "ep": "8.0"},
        unknown | {"kind": "vlm", "trained": "projector+language_model", "gpu": "GB200"},
        {"model": "Bar-VLM", "kind": "vlm", "trained": "projector", "pp": "2", "dp": "2"},
        {"model": "Bar-VLM", "kind": "vlm", "pp": "2", "dp": "2"},
        {"model": "Baz", "kind": "generation", "params_total_b": "14", "trained": "lora", "fsdp": "megatron_fsdp"},
    )
    assert found["left_out"] == []
    said = [" ".join(row["said"]) for row in found["rows"]]
    assert re.search(r"unknown model, shaped like Qwen3-8B: 35 layers", said[0])
    assert re.search(r"\d+ experts of which 6 are chosen, [23]\d[.\d]*B parameters, 3B active", said[1])
    assert all("an encoder like SigLIP-so400m" in each for each in said[2:5])
    assert "2 sets of weights" in said[5]
    some, everything = (row["predicted_s"] for row in found["rows"][3:5])
    assert some < everything
    assert found["memory_rows"] == 5
    assert found["rows"][0]["published_s"] == pytest.approx(16 * 2048 / (4000 * 8))


def test_predictions_follow_the_layout_and_nothing_that_was_measured(predict):
    """What is recomputed, adapted or idle takes more or less time, where sequences are so long that the host does not
    decide; the measured columns change errors alone."""
    ways = {"recompute": "full"}, {"trained": "lora"}, {"pp": "2", "dp": "2"}, {"fsdp": "fsdp2"}, {"gpu": "B200"}
    layouts = [{"seq_len": "16384", **way} for way in ({}, *ways)]
    _, found = predict(*layouts)
    plain, again, lora, pipeline, gathered, faster = (row["predicted_s"] for row in found["rows"])
    assert faster < lora < plain < min(again, gathered, pipeline)
    measured = {"step_ms": "500", "tflops_per_gpu": "900", "tokens_per_s_per_gpu": "7", "peak_memory_gib": ""}
    _, other = predict(*({**measured, **each} for each in layouts))
    assert [row["predicted_s"] for row in other["rows"]] == [row["predicted_s"] for row in found["rows"]]
    assert (other["memory_error"], other["memory_rows"]) == (None, 0)
    errors = [abs(row["predicted_s"] / 2 - 1) for row in found["rows"]]
    assert found["mean_step_error"] == pytest.approx(sum(errors) / 6)
    assert found["worst_step_error"] == pytest.approx(max(errors))
    assert (found["lora"]["runs"], found["full"]["runs"]) == (1, 5)
    (ratio,) = found["lora_over_full"]
    assert ratio["predicted"] == pytest.approx(lora / ((again + plain + pipeline + gathered + faster) / 5))


def test_packed_samples_on_context_parallel_ranks_keep_the_host_busy(predict):
    """In a layer, for each of 42 samples and two ranks twice, four tensors each way: 72 operations and ends of ranges,
    and 40 again where blocks are recomputed. Not with ring attention, nor where no ranks share a sample."""
    cells = {"seq_len": "32768", "cp": "2", "dp": "2"}
    others = ({"model": name, "params_total_b": "30"} for name in ("Qwen3-30B-A3B", "Moonlight-16B-A3B"))
    short = cells | {"seq_len": "4096"}  # the host decides: five samples come on top of what it launches
    rows = cells, cells | {"recompute": "full"}, short, *(cells | other for other in others), {"seq_len": "32768"}
    _, found = predict(*(row | {"packed": way} for way in ("no", "offline") for row in rows))
    seconds = [row["predicted_s"] for row in found["rows"]]
    added = [packed - plain for plain, packed in zip(seconds[:6], seconds[6:], strict=True)]
    each = 36 * 8 * 42 * 2 * 2 * 10e-6  # layers, microbatches, samples, ranges of a sample, seconds of an operation
    assert added == pytest.approx([72 * each, 112 * each, 72 * each * 5 / 42, 0, 0, 0], rel=1e-3, abs=1e-9)
    assert "42 packed samples of 775 tokens" in found["rows"][6]["said"]


def test_the_trivial_predictor_knows_flops_alone(predict):
    """A table that it made itself is its own, and not the simulation's."""
    peak, flops = 989.4e12, 6 * 8e9 * 16 * 2048
    seconds = flops / (0.4 * peak * 8)
    made = [{"seq_len": str(n * 2048), "step_ms": str(1e3 * n * seconds)} for n in (1, 2, 4)]
    _, found = predict(*made, {"seq_len": "8192", "trained": "lora", "step_ms": str(4e3 * seconds)})
    assert [row["trivial_s"] for row in found["rows"]] == pytest.approx([n * seconds for n in (1, 2, 4, 4)])
    assert found["trivial"]["mean_step_error"] == pytest.approx(0)
    assert found["trivial"]["rank_correlation"] == pytest.approx(1)
    assert found["mean_step_error"] > 0.05
    assert found["rank_correlation"] < 1


def test_repeats_of_a_run_count_once(predict):
    _, found = predict({}, {"id": "again", "step_ms": "2200"}, {"trained": "lora"})
    assert (found["rows_read"], found["runs"]) == (3, 2)
    predicted = [row["predicted_s"] for row in found["rows"]]
    assert predicted[0] == predicted[1]
    errors = abs(predicted[0] / 2.1 - 1), abs(predicted[2] / 2 - 1)
    assert found["mean_step_error"] == pytest.approx(sum(errors) / 2)
    assert found["every_row"]["mean_step_error"] != found["mean_step_error"]


def test_the_kept_table_is_read_as_its_page_says(bench):
    from benchmarks.cards.llm_sizes import NAMED, llm_sizes
    from benchmarks.cards.published_runs import CARDS, read_runs

    runs, left_out = read_runs(CARDS)
    assert (len(runs), left_out) == (44, [])
    known = {run.id: run for run in runs}
    for run in runs:
        sizes, said = llm_sizes(run.model, run.total, run.active, run.ep or 1)
        assert not said
        assert sizes.counts[0] == pytest.approx(run.total, rel=0.1)
    assert NAMED["deepseekv3"].counts == pytest.approx((671, 37.5), rel=0.01)
    assert known["bagel-7b-mot.pretrain_fsdp.H100"].tokens == 34089
    assert known["automodel.Llama-3-70B.lora.H100.8"].recompute == "full"
    assert known["automodel.gpt-oss-20b.pretrain.H100.8"].recompute == "none"
    assert known["automodel.gpt-oss-120b.pretrain.H100.64"].recompute == "none"
    assert known["gpt-oss-120b.sft.H100"].recompute == "none"
    repeats = [known[f"gpt-oss-20b.{item}.H100"] for item in ("pretrain", "checkpoint_resume")]
    assert repeats[0].inputs == repeats[1].inputs
