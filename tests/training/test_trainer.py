"""The trainer against a training loop as one would write it, and what it leaves in its dump folder."""

import json
import math
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from hetmesh.api import run_recipe
from hetmesh.boundary import World
from hetmesh.cli import main
from hetmesh.cli.check import checked
from hetmesh.data.loader import Loader
from hetmesh.recipe.recipe import load_recipe
from hetmesh.records import checkpoint_folders
from hetmesh.records.dump_folder import trim_metrics
from hetmesh.records.events import is_writing
from hetmesh.records.metrics import StepMetrics
from hetmesh.records.reporter import Reporter
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import Timeline
from hetmesh.testing.precision import exact_dtypes
from hetmesh.training.environment import choose_kernels
from hetmesh.training.trainer import Trainer

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 5


def small(name, folder, *overrides):
    local = {"digits_colocated": 4, "digits_overlapping": 4}.get(name, 8)
    given = (
        *("--training.local_batch_size", str(local), "--training.steps", str(STEPS), "--training.max_norm", "0.5"),
        *("--job.dump_folder", str(folder), "--lr_scheduler.warmup_steps", "2", "--validation.samples", "6"),
        *("--modules.llm.lr", "3e-3", "--modules.llm.weight_decay", "0.2", "--metrics.enable_tensorboard", "false"),
    )
    return load_recipe(RECIPES / f"{name}.toml", (*given, *overrides))


def exact(folder, name, *overrides):
    return small(name, folder, "--training.dtype", "float64", *overrides)


def plain_loop(recipe):
    """Loss and gradient norm per step, by torch's own clipping and optimizers."""
    resolved = resolve(recipe)
    source, adapters, graph = resolved.source, resolved.adapters, resolved.graph
    modules = {name: loaded_module(recipe, adapters[name], name) for name in graph.order}
    parameters = {name: list(module.parameters()) for name, module in modules.items()}
    everything = [p for some in parameters.values() for p in some]
    o, llm = recipe.optimizer, recipe.modules["llm"]
    groups = [
        {"params": parameters["vision"] + parameters["projector"], "lr": o.lr, "weight_decay": o.weight_decay},
        {"params": parameters["llm"], "lr": llm.lr, "weight_decay": llm.weight_decay},
    ]
    if o.name == "SGD":
        optimizer = torch.optim.SGD(groups)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)
    # one cycle: up in two steps, down along a cosine over the other three
    factors = [0.5, 1.0, 1.0, *(0.5 * (1 + math.cos(math.pi * i / 3)) for i in (1, 2))]
    loader = Loader(source, 8, resolved.expander, seed=recipe.debug.seed)
    taken = []
    with exact_dtypes(*modules.values()):
        for factor in factors:
            drawn = next(loader)
            samples, rows, batch = loader.load(drawn), {}, {}
            for name in graph.order:
                metas = [d.meta for d in drawn]
                batch = adapters[name].collate(samples, metas, placeholders=source.placeholders, pad_id=source.pad_id)
                inputs = {b.source: rows[b.source] for b in graph.inputs(name)}
                rows[name] = adapters[name].forward(modules[name], batch, inputs)
            loss = nn.functional.cross_entropy(rows[graph.llm.name], batch["targets"])
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(everything, recipe.training.max_norm)
            for group, rate in zip(optimizer.param_groups, (o.lr, llm.lr), strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            taken.append((loss.item(), norm.item(), o.lr * factor))
    return taken


def on_this_rank(rank, recipe):
    trainer = Trainer(resolve(recipe), World.current())
    trainer.reporter.close()
    with exact_dtypes(trainer.job.root):
        taken = [trainer.train_step() for _ in range(STEPS)]
    return [(m.loss, m.grad_norm, m.lr) for m in taken]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(pytest.param(name, "AdamW", marks=pytest.mark.exhaustive) for name in ("digits_single", "digits")),
        pytest.param("digits_colocated", "AdamW", marks=pytest.mark.exhaustive),
        ("digits_overlapping", "AdamW"),
        pytest.param("digits_colocated", "SGD", marks=pytest.mark.exhaustive),
    ],
)
def test_every_step_equals_that_of_a_plain_loop(pool4, tmp_path, name, optimizer):
    """U4, U5, U6 with the optimizer of the recipes: loss, norm before clipping and learning rate of each step."""
    # eps far above its default keeps AdamW smooth where gradients are rounding errors, so that layouts compare exactly
    keys = {"AdamW": ("--optimizer.lr", "2e-3", "--optimizer.eps", "0.01"), "SGD": ("--optimizer.lr", "0.5")}
    chosen = ("--optimizer.name", optimizer, *keys[optimizer])
    expected = plain_loop(exact(tmp_path, "digits_single", *chosen))
    assert all(norm > 0.5 for _, norm, _ in expected)  # every step is clipped
    for taken in pool4.run(on_this_rank, exact(tmp_path, name, *chosen)):
        for (loss, norm, lr), (true_loss, true_norm, true_lr) in zip(taken, expected, strict=True):
            assert loss == pytest.approx(true_loss, rel=1e-9)
            assert norm == pytest.approx(true_norm, rel=1e-9)
            assert lr == pytest.approx(true_lr, rel=1e-12)


def test_a_process_that_has_checked_a_recipe_does_not_resolve_it_again(world, tmp_path, monkeypatch):
    recipe = small("digits_single", tmp_path, "--training.steps", "1")
    resolved, _ = checked(recipe)
    monkeypatch.setattr("hetmesh.training.trainer.resolve", None)
    assert run_recipe(recipe, resolved)["steps"] == 1


def test_a_run_leaves_metrics_a_summary_events_and_readable_lines(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    overrides = ("--metrics.log_freq", "2", "--validation.freq", "4", "--metrics.enable_tensorboard", "true")
    summary = Trainer(resolve(small("digits_single", tmp_path, *overrides)), world).run()
    out = capsys.readouterr().out

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 5]
    evaluated = [line["validation"] for line in lines if "validation" in line]
    assert [each["samples"] for each in evaluated] == [6, 6]
    assert evaluated[-1]["loss"] == summary["validation_loss"]
    assert evaluated[-1]["answer_accuracy_by_kind"] == summary["answer_accuracy_by_kind"]
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(each["event"], each["step"]) for each in told] == [("started", 0), ("ended", 5)]
    stamps = [each["timestamp"] for each in (told[0], *lines, told[1])]
    assert stamps == sorted(stamps)
    assert is_writing(tmp_path) is False
    lines = [line for line in lines if "loss" in line]
    for line in lines:
        first = ("step", "loss", "grad_norm", "lr", "samples_per_s", "tokens_per_s", "time_s")
        assert tuple(line)[: len(first)] == first
        assert line["samples_per_s"] == pytest.approx(8 / line["time_s"])
    assert [line["lr"] for line in lines[:2]] == [1e-3, 2e-3]

    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    wanted = {"steps", "ranks", "train_seconds", "loss", "validation_loss", "answer_accuracy", "questions"}
    assert wanted <= set(summary)
    assert (summary["steps"], summary["questions"], summary["loss"]) == (5, 6, lines[-1]["loss"])
    kinds = summary["answer_accuracy_by_kind"]
    assert set(kinds) <= {"read", "sum", "add"}

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logged = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert [step for step, _ in logged["loss"]] == [2, 4, 5]
    for tag in ("loss", "grad_norm", "lr", "samples_per_s", "tokens_per_s", "time_s"):
        assert [value for _, value in logged[tag]] == pytest.approx([lines[i - 1][tag] for i in (2, 4, 5)])
    assert logged["validation/loss"][-1] == (5, pytest.approx(summary["validation_loss"]))
    assert [step for step, _ in logged["validation/answer_accuracy"]] == [4, 5]

    assert [line.split()[1] for line in out.splitlines() if line.startswith("step ")] == ["2/5", "4/5", "5/5"]
    (last,) = (line for line in out.splitlines() if line.startswith("validation at step 5: "))
    assert all(kind in last for kind in kinds)  # in one line, although it is longer than 80 columns
    assert out.count("\nQ: ") == 5
    assert out.count("\nA: ") == 5


def kept(folder, resumed_at):
    trim_metrics(folder / "metrics.jsonl", resumed_at)
    return (folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize("tail", ["", '{"step": 6, "lo', '{"step": 6}', "\n"])
def test_a_resumed_run_drops_later_lines_and_a_half_written_one(tmp_path, tail):
    reporter = Reporter(tmp_path, 9, rank=0)
    for step in range(1, 6):
        reporter.step(StepMetrics(step, 2.0, 1.0, 0.1, 5.0, 6.0, 7.0))
    reporter.close()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + tail)
    assert kept(tmp_path, 5) == "".join(lines)
    path.write_text("".join(lines) + tail)
    assert kept(tmp_path, 3) == "".join(lines[:3])
    assert kept(tmp_path, 0) == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_lines_are_printed_as_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    reporter = Reporter(tmp_path, 9, rank=0)
    text = "##@@  " * 30 + "\n[bold]" + "x" * 100
    reporter.print(text)
    reporter.evaluation(3, {f"kind {i} [of]": 0.5 for i in range(12)})
    reporter.close()
    out = capsys.readouterr().out
    assert out.startswith(text + "\n")
    assert out.count("\n") == 3
    assert "kind 11 [of] 0.5000" in out


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def kernels(monkeypatch):
    """Torch's choices as a process has them at first, and afterwards as they were."""
    monkeypatch.setenv(WORKSPACE, "")  # so that it is taken back even if it was not set before
    monkeypatch.delenv(WORKSPACE)
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    yield monkeypatch
    torch.backends.cuda.enable_cudnn_sdp(before[0])
    torch.use_deterministic_algorithms(before[1], warn_only=warns)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_are_chosen_by_recipe_and_device(kernels, device, deterministic):
    choose_kernels(deterministic, torch.device(device))
    assert torch.backends.cuda.cudnn_sdp_enabled() == (device == "cpu")
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert os.environ.get(WORKSPACE) == (":4096:8" if deterministic else None)


def test_a_workspace_that_is_set_stays(kernels):
    kernels.setenv(WORKSPACE, ":16:8")
    choose_kernels(True, torch.device("cpu"))
    assert os.environ[WORKSPACE] == ":16:8"


def recorded_step(rank, recipe):
    Trainer(resolve(recipe), World.current()).run()


@pytest.mark.slow
def test_a_default_run_records_a_step_and_answers_at_no_change_of_a_bit(pool4, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for folder, keys in (("on", ()), ("off", ("--profiling.timeline=false",))):
        recipe = small(
            "digits_colocated",
            tmp_path / folder,
            *keys,
            "--modules.llm.config.attention_dropout=0.1",
            "--training.steps=3",
        )
        pool4.run(recorded_step, recipe)
    on, off = ((tmp_path / each / "metrics.jsonl").read_text().splitlines() for each in ("on", "off"))
    same = ("step", "loss", "grad_norm", "validation")
    for one, two in zip(map(json.loads, on), map(json.loads, off), strict=True):
        one, two = ({key: each.get(key) for key in same} for each in (one, two))
        for each in (one, two):
            (each["validation"] or {}).pop("time_s", None)
        assert one == two
    assert not (tmp_path / "off" / "timeline.json").exists()
    assert main(["report", str(tmp_path / "on"), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    sections = dict(re.findall(r'<section aria-labelledby="([^"]+)">(.*?)</section>', page, re.DOTALL))
    assert {"answers", "a-recorded-step", "where-the-time-went"} <= set(sections)
    assert "after the right ones before it" in sections["answers"]
    assert "A: " in sections["answers"]
    assert [name for name, text in sections.items() if not re.search("<(img|table|pre|li)", text)] == []


@pytest.mark.slow
def test_in_a_recorded_step_ranks_of_a_frozen_tower_wait_for_the_others(pool4, tmp_path):
    keys = ("--modules.vision.trainable=false", "--profiling.timeline=true", "--training.steps=2")
    pool4.run(recorded_step, small("digits", tmp_path, *keys, "--checkpoint.enable=false"))
    timeline = Timeline.from_json(json.loads((tmp_path / "timeline.json").read_text())["measured"])
    spent = Counter()  # one track per rank
    for span in timeline.spans():
        spent[span.track, span.kind == "OPTIMIZER"] += span.stop - span.start
    assert spent[0, True] < spent[3, False] / 2  # which it waits for, and has nothing to do itself


@pytest.mark.slow
def test_checkpoints_that_an_earlier_start_could_not_remove_go_when_the_run_ends(tmp_path, world, monkeypatch):
    """Killed between the name of the last checkpoint and the removal of older ones: no save comes after that."""
    keys = ("--checkpoint.enable", "true", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2")
    recipe = small("digits_single", tmp_path, *keys, "--checkpoint.async_mode", "disabled")
    retire, calls = checkpoint_folders.retire_old, []

    def killed_before(folder, keep_latest):
        calls.append(folder)
        return [] if len(calls) <= STEPS else retire(folder, keep_latest)

    monkeypatch.setattr(checkpoint_folders, "retire_old", killed_before)
    Trainer(resolve(recipe), world).run()
    assert checkpoint_folders.complete_steps(tmp_path / "checkpoint") == [STEPS - 1, STEPS]
