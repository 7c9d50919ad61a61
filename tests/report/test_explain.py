"""What a recipe means, as values, text and picture."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.tensor import Replicate

from hetmesh.data.digits import DigitsSource
from hetmesh.data.loader import Loader
from hetmesh.errors import SampleError, UsageError
from hetmesh.layout import Layout, MeshSpec, RowSplit
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.report import as_text, explain, save_picture
from hetmesh.report.balance_view import balance_view
from hetmesh.report.explain import cell, layout_text
from hetmesh.report.text import traffic_text
from hetmesh.report.values import BoundaryView, Traffic
from hetmesh.resolve.planning import recipe_problem
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve
from support import tiny_vlms

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def views():
    """`views(name, *overrides)`: the view of a recipe, made once."""
    made = {}

    def get(name, *overrides):
        if (name, overrides) not in made:
            made[name, overrides] = explain(resolve(load_recipe(RECIPES / f"{name}.toml", overrides)))
        return made[name, overrides]

    return get


def test_modules_on_ranks(views):
    view = views("digits")
    vision, projector, llm = view.modules
    assert view.ranks == 4
    assert (vision.cells, projector.cells) == ({0: "dp0", 1: "dp1"}, {2: "tp0", 3: "tp1"})
    assert (vision.lanes, llm.lanes) == (2, 1)
    assert (vision.axes, llm.axes) == ({"dp_replicate": 2}, {"tp": 2})
    assert vision.parameters == vision.trainable_parameters == 101_440
    assert [vision.memory[rank].elements for rank in vision.ranks] == [101_440] * 2
    assert 0.5 < llm.memory[2].elements / (llm.parameters or 0) < 0.51  # norms and the embedding are on both
    assert view.memory(2) == projector.memory[2].total + llm.memory[2].total
    assert all(module.training == "trained" for module in view.modules)
    assert view.tokens == llm.work.rows
    assert vision.imbalance >= 1


def test_frozen_modules_have_no_state_and_no_backward(views):
    view = views("digits", "--modules.vision.trainable", "false")
    vision = view.modules[0]
    assert vision.training == "frozen"
    assert vision.flops is not None
    assert vision.flops.backward == 0
    assert {(m.gradients, m.optimizer) for m in vision.memory.values()} == {(0, 0)}
    assert view.boundaries[0].backward is None
    assert view.boundaries[1].backward is not None
    assert "backward  none: nothing upstream is trained" in as_text(view)


def test_a_fully_sharded_module(views):
    given = ("--parallelism.llm.tensor_parallel_degree", "1", "--parallelism.llm.data_parallel_shard_degree", "2")
    llm = views("digits", *given).modules[2]
    assert llm.cells == {2: "fsdp0", 3: "fsdp1"}
    assert sum(memory.elements for memory in llm.memory.values()) == llm.parameters


@pytest.mark.parametrize("name", ["digits", "digits_colocated", "digits_overlapping", "digits_single"])
def test_bytes_equal_the_bound(views, name):
    for boundary in views(name).boundaries:
        for traffic in (boundary.forward, boundary.backward):
            assert traffic is not None
            assert traffic.bytes == traffic.bound


def test_cells_and_layouts_in_words():
    assert cell(MeshSpec.make([4, 7, 1, 3], dp_shard=2, tp=2), 1) == "fsdp1 tp0"
    mesh = MeshSpec.make(range(4), lane=2, tp=2)
    split = RowSplit(0, (((0, 3), (8, 11)), ((3, 8),)))
    assert layout_text(Layout(mesh, (split, Replicate())), (11, 7)) == "lane 2: rows split 6+5, tp 2: replicated"
    many = RowSplit(0, tuple(((i, i + 1),) for i in range(6)))
    assert layout_text(Layout(MeshSpec.make(range(6), lane=6), (many,)), (6, 7)) == "lane 6: rows split, 1 to 1 each"
    one = Layout(MeshSpec.make([3], lane=1), (RowSplit(0, (((0, 5),),)),))
    assert layout_text(one, (5, 7)) == "all 5 rows on rank 3"


def test_what_stages_hold_is_told(views):
    view = views("digits")
    vision, projector, llm = view.modules
    assert {len(m.held) for m in view.modules} == {1}
    assert {m.microbatches for m in view.modules} == {view.microbatches}
    assert [m.held[0].microbatches for m in (vision, projector, llm)] == [1, 1, 1]  # one after the other
    assert 0 < vision.held[0].rows <= vision.work.rows
    lines = as_text(view).splitlines()
    of = f"1 of {view.microbatches} microbatch{'es' if view.microbatches > 1 else ''}"
    assert f"  vision.0: {of}, {vision.held[0].rows:,} rows" in lines
    assert f"  llm.0: {of}, {llm.held[0].rows:,} tokens" in lines


def test_text_shows_ranks_modules_and_boundaries(views):
    lines = as_text(views("digits_colocated")).splitlines()
    (row,) = [line for line in lines if line.startswith("  llm ") and "│" in line]
    assert [part.strip() for part in row.split("│")] == ["llm", "dp0 tp0", "dp0 tp1", "dp1 tp0", "dp1 tp1"]
    assert any("between ranks, the least possible; by p2p" in line for line in lines)
    assert any(line.startswith("  projector -> llm at 'image': ") for line in lines)
    assert not any(line != line.rstrip() for line in lines)


def test_narrow_terminals_get_the_picture_in_parts(views):
    lines = as_text(views("digits_colocated"), width=40).splitlines()
    headers = [line for line in lines if "│ rank" in line]
    assert [header.count("rank") for header in headers] == [2, 2]
    assert all(len(line) <= 40 for line in lines if "│" in line)


def test_a_plan_that_moves_too_much_is_told(views):
    from hetmesh.report.text import traffic_text

    assert traffic_text(Traffic(2000, 1000, {"gloo": "p2p", "nccl": "all_to_all"})) == (
        "2 kB between ranks, at least 1 kB needed; by p2p on gloo, all_to_all on nccl"
    )
    assert BoundaryView("a", "b", None, (1, 1), "", "", Traffic(0, 0, {}), None).name == "a->b"


def test_json_holds_everything(views):
    text = json.dumps(views("digits").as_json())
    read = json.loads(text)
    assert read["modules"][0]["cells"] == {"0": "dp0", "1": "dp1"}
    assert read["modules"][2]["memory"]["2"]["optimizer"] > 0
    assert set(read["boundaries"][0]["forward"]) == {"bytes", "bound", "transport"}


@pytest.mark.slow
def test_the_picture_is_a_png(views, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "digits.png"
    save_picture(views("digits", "--modules.vision.trainable", "false"), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="cannot be written: no such file or directory"):
        save_picture(views("digits"), tmp_path / "nowhere" / "x.png")
    with pytest.raises(UsageError, match="cannot be written: embedded null byte"):
        save_picture(views("digits"), "a\0b.png")


def test_without_matplotlib_the_error_says_what_to_install(views, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"needs matplotlib: pip install 'hetmesh\[report\]'"):
        save_picture(views("digits"), tmp_path / "x.png")


def test_eight_billion_parameters_without_a_weight(views):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    view = views("siglip_qwen3_8b")
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < 1e9
    vision, projector, llm = view.modules
    assert llm.parameters == 8_190_735_360  # as Qwen/Qwen3-8B
    assert vision.parameters == 412_987_248  # so400m without its pooling head
    assert set(llm.cells.values()) == {f"fsdp{i} tp{j}" for i in range(2) for j in range(4)}
    assert view.memory(0) < 40e9
    assert projector.dtype == llm.dtype == "bfloat16"
    assert view.dtype == "float32"
    # 6 FLOPs per parameter that multiplies, token by token, and attention on top
    assert llm.flops is not None
    assert llm.flops.total > 6 * 6.9e9 * llm.work.rows


@pytest.mark.slow
def test_thirty_billion_parameters_of_experts_fit(views):
    view = views("qwen3_vl_30b_a3b")
    vision, llm = view.modules
    assert llm.parameters == 30_532_122_624  # as Qwen/Qwen3-30B-A3B, whose sizes these are
    assert vision.parameters == 538_631_408
    assert set(llm.cells.values()) == {f"pp{i} fsdp0 ep{j}" for i in range(2) for j in range(8)}
    each = 128 // 8 * 3 * 2048 * 768 * 24  # a rank's experts in its half of the layers
    assert each < llm.memory[0].elements < 1.2 * each
    assert view.fit is not None
    assert view.fit.fits
    assert view.notes


@pytest.mark.slow
def test_samples_that_a_run_leaves_out_keep_nobody_from_looking_at_it(monkeypatch):
    keys = ["--training.local_batch_size", "8", "--data.on_bad_sample"]
    at, meta = Loader(DigitsSource(), 8).indices(0)[0], DigitsSource.meta

    def broken(self, index):
        if index == at:
            raise SampleError(f"sample {index}: its header is broken")
        return meta(self, index)

    monkeypatch.setattr(DigitsSource, "meta", broken)
    monkeypatch.delattr(DigitsSource, "metas", raising=False)
    for verb in (explain, simulate_recipe, partial(balance_view, batches=1), recipe_problem):
        verb(resolve(load_recipe(RECIPES / "digits_single.toml", [*keys, "skip"])))
        with pytest.raises(SampleError, match="its header is broken"):
            verb(resolve(load_recipe(RECIPES / "digits_single.toml", [*keys, "stop"])))


def test_what_one_hosts_memory_carries_is_not_said_to_be_gloos():
    carried = {"memory": "p2p", "gloo": "p2p", "nccl": "all_to_all"}
    said = traffic_text(Traffic(8, 8, carried))
    assert said.endswith("by p2p on memory (CPUs of one host) and gloo, all_to_all on nccl")
    assert traffic_text(Traffic(8, 8, dict.fromkeys(carried, "p2p"))).endswith("; by p2p")


def test_a_note_says_what_recurrences_send_where_samples_are_cut(tmp_path):
    path = tiny_vlms.save("qwen3_5", tmp_path)
    ranks = '[parallelism.vision]\nranks = "0-1"\n[parallelism.llm]\nranks = "0-1"\ncontext_parallel_degree = {}\n'
    shared, alone = (explain(resolve(parse_recipe(tiny_vlms.recipe_text(path, ranks.format(cp))))) for cp in (2, 1))
    (note,) = shared.notes
    # float64: maps of 6 x 12 and states of 6 x 6 of 4 heads, three inputs of 48 features; then twice the states
    assert "each 4.61 kB forward and 3.46 kB backward of states in each of 2 layers with a recurrence" in note
    assert not alone.notes
