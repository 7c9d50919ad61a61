"""`bench.py planner`: tables are read or refused by row and column; what is said of predictions adds up."""

import json
import re
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
HEAD = (
    "model,vision_percent,gpus,homogeneous_E,homogeneous_L,colocated_E,colocated_L,gain_percent,peak_gb_homogeneous,"
    "peak_gb_colocated,step_ms_homogeneous,step_ms_colocated"
)
ROW = "1B+7B,50,8,2/1/1/4,2/1/1/4,1/1/1/8,2/1/2/2,10.0,50,40,1000,900"


@pytest.fixture
def bench(monkeypatch):
    """`tools/bench.py`."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import bench

    return bench


@pytest.mark.parametrize(
    ("head", "row", "said"),
    [
        (HEAD, ROW.replace("1B+7B", "7B"), r"line 3, column model: '7B': write billions"),
        (HEAD, ROW.replace("2/1/1/4,2", "2/1/4,2", 1), r"line 3, column homogeneous_E: '2/1/4': write TP/CP/PP/DP"),
        (HEAD, ROW.replace("2/1/2/2", "2/1/2/4"), r"line 3, column colocated_L: the layout takes 16 GPUs, not 8"),
        (HEAD, ROW.replace("1000", "soon"), r"line 3, column step_ms_homogeneous: 'soon' is no number"),
        (HEAD, ROW.replace("50,8", "150,8"), r"column vision_percent: '150' must be above 0, at most 100"),
        (HEAD, ROW + ",9", r"line 3: 13 cells for 12 columns"),
        (HEAD.replace("gpus,", "ranks,"), ROW, r"line 2: columns \['gpus'\] are missing"),
        (HEAD + ",phase", ROW + ",all", r"line 3, column phase: 'all': valid are step, forward_backward"),
        (HEAD + ",microbatches", ROW + ",3", r"column microbatches: global_batch = 8 does not divide over 4 lanes"),
        (HEAD, "", r"no row below the names"),
    ],
)
def test_a_malformed_table_is_refused_by_row_and_column(bench, tmp_path, capsys, head, row, said):
    table = tmp_path / "rows.csv"
    table.write_text(f"# a source\n{head}\n{row}\n")
    assert bench.main(["planner", "--rows", str(table)]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_rows_of_any_table_are_predicted(bench, tmp_path, capsys):
    table = tmp_path / "rows.csv"
    apart = ROW.replace("1/1/1/8,2/1/2/2", "2/1/1/2,2/1/1/4")
    lines = [f"{HEAD},placement,gpus_other,phase,seq", f"{ROW},,,,4096", f"{apart},disjoint,12,forward_backward,4096"]
    table.write_text("\n".join(lines))
    assert bench.main(["planner", "--rows", str(table), "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["rows"]
    predicted = [each[which]["predicted_s"] for each in (first, second) for which in ("homogeneous", "second")]
    published = [1.0, 0.9, 1.0, 0.9]
    errors = [abs(a / b - 1) for a, b in zip(predicted, published, strict=True)]
    assert found["mean_step_error"] == pytest.approx(sum(errors) / 4)
    assert first["predicted_gain"] == pytest.approx(100 * (predicted[0] / predicted[1] - 1))
    peaks = [each[which] for each in (first, second) for which in ("homogeneous", "second")]
    limit, published = 80e9, [50e9, 40e9, 50e9, 40e9]
    errors = [abs(each["predicted_peak_bytes"] / of - 1) for each, of in zip(peaks, published, strict=True)]
    assert found["peak_memory_error"] == pytest.approx(sum(errors) / 4)
    assert found["fits_80gb_share"] == sum(each["predicted_peak_bytes"] <= limit for each in peaks) / 4
    assert [sum(each["peak_of"].values()) for each in peaks] == [each["predicted_peak_bytes"] for each in peaks]
    assert [bool(each["memory_remarks"]) for each in peaks] == [error > 0.25 for error in errors]
    assert found["memory"]["the mean of the published peaks"]["peak_memory_error"] == pytest.approx((0.1 + 0.125) / 2)
    fp32 = found["memory"]["gradients in fp32"]["peak_memory_error"]
    assert fp32 != found["peak_memory_error"]
    assert second["predicted_gain"] == pytest.approx(100 * (predicted[2] * 8 / (predicted[3] * 12) - 1))
    assert predicted[2] < predicted[0]  # the same layout without what comes after the last backward
    gains = [abs(first["predicted_gain"] - 10), abs(second["predicted_gain"] - 10)]
    assert found["gain_error_points"] == pytest.approx(sum(gains) / 2)
    assert found["trivial"]["gain_error_points"] == 0


def test_rows_with_other_columns_encoder_cp_tp_and_pipelines_are_predicted_or_named(bench, tmp_path, capsys):
    """Encoders with CP, TP and PP, on the LLM's ranks and on others; what cannot be laid out is left out by name."""
    table = tmp_path / "rows.csv"
    shared = ROW.replace("1/1/1/8,2/1/2/2", "2/2/1/2,2/1/2/2")
    apart = ROW.replace("1/1/1/8,2/1/2/2", "1/2/2/1,2/1/1/2")
    cannot = ROW.replace("1/1/1/8,2/1/2/2", "2/1/1/1,1/1/64/1")
    lines = [f"{HEAD},speed,placement,seq,gpus_other", f"{shared},9,,4096,8", f"{apart},9,disjoint,4096,8"]
    table.write_text("\n".join([*lines, f"{cannot},9,disjoint,4096,66"]))
    assert bench.main(["planner", "--rows", str(table), "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 2
    assert all(row[which]["predicted_s"] > 0 for row in found["rows"] for which in ("homogeneous", "second"))
    column, row = found["left_out"]
    assert column == "column speed"
    assert row.startswith("1B+7B on 8 GPUs: ")


def test_shapes_have_the_size_that_they_stand_for(bench):
    from benchmarks.planner.architectures import DECODERS, ENCODERS, decoder, encoder

    sizes = [*((each.size, each) for each in (*ENCODERS, *DECODERS)), (2.0, encoder(2.0)), (20.0, decoder(20.0))]
    for size, each in sizes:
        assert each.shape().parameters / 1e9 == pytest.approx(size, rel=0.2)


def test_a_block_of_the_paper_has_its_bytes(bench):
    """Korthikanti et al., equation 4: 34 bytes times rows and width, of which two are masks of dropout."""
    from benchmarks.planner.architectures import Encoder
    from benchmarks.planner.megatron_bytes import _block

    assert _block(Encoder(1.0, "GPT", 1, 64, 256), 2 * 256) == 32 * 64
