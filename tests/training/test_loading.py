"""Jobs whose samples worker processes load: the same training, and a named error when one of them dies."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetmesh.data import Loader, payload_workers
from hetmesh.data.digits import DigitsSource
from hetmesh.data.source import wants
from hetmesh.errors import SampleError

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_overlapping.toml"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")]


class Deadly(DigitsSource):
    """Kills whichever process loads sample `at` of the training data."""

    def __init__(self, split="train", at=-1):
        super().__init__(split)
        self.at = at

    def load(self, index, kinds=None):
        if self.split == "train" and index == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(index, kinds)


class Spoilt(DigitsSource):
    """The pixels of sample `at` cannot be read, and of sample `never` not even the metadata. With `masked` both can,
    and have no targets."""

    def __init__(self, split="train", at=-1, never=-1, masked=False):
        super().__init__(split)
        self.at, self.never, self.masked = at, never, masked

    def meta(self, index):
        meta = super().meta(index)
        if self.split == "train" and index in (self.at, self.never):
            if self.masked:
                return replace(meta, targets=())
            if index == self.never:
                raise SampleError(f"sample {meta.id!r}: its header is broken")
        return meta

    def load(self, index, kinds=None):
        if self.split == "train" and index == self.at and not self.masked and wants(kinds, "image"):
            raise SampleError(f"sample {self._id(index)!r}: its image is broken")
        return super().load(index, kinds)


def spoilt(step):
    """Numbers of two samples of a step of 16, the first with an image."""
    indices = Loader(DigitsSource(), 16).indices(step)
    first, *others = sorted(indices, key=lambda i: -len(DigitsSource().meta(i).media))
    return first, others[0]


def overrides(folder, *more):
    keys = ("--job.dump_folder", str(folder), "--training.steps", "3", "--metrics.log_freq", "1")
    keys += ("--training.local_batch_size", "8", "--parallelism.llm.pipeline_parallel_microbatch_size", "4")
    keys += ("--modules.vision.config.num_hidden_layers", "1", "--modules.llm.config.num_hidden_layers", "1")
    return (*keys, "--validation.samples", "16", *more)


def test_training_is_the_same_with_workers_which_are_forked_from_one_thread(start_training, tmp_path):
    runs = [
        start_training(RECIPE, *overrides(tmp_path / n, "--data.num_workers", n, "--metrics.verbose", "true"))
        for n in ("0", "2")
    ]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    kept = ("loss", "grad_norm")
    lines = [
        [line for line in map(json.loads, (tmp_path / n / "metrics.jsonl").open()) if "loss" in line]
        for n in ("0", "2")
    ]
    assert [[line[key] for key in kept] for line in lines[0]] == [[line[key] for key in kept] for line in lines[1]]
    assert all(line["data"]["wait_s"] > 0 for run in lines for line in run)
    assert all("  data/load_s " in out for out, _ in outputs)
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("0", "2")]
    assert summaries[0]["validation_loss"] == summaries[1]["validation_loss"]


def test_u27_a_worker_that_dies_ends_the_job_with_the_name_of_the_sample(start_training, tmp_path):
    at = Loader(DigitsSource(), 16).indices(1)[0]
    keys = ("--data.source", f"{Path(__file__).stem}:Deadly", "--data.options.at", str(at), "--data.num_workers", "1")
    run = start_training(RECIPE, *overrides(tmp_path / "run", *keys))
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "a process that loads samples has died while it was at sample 'digits/train/" in errors
    assert "Traceback" not in errors


def test_samples_that_cannot_be_read_are_left_out_on_all_ranks_named_and_counted(start_training, tmp_path):
    """The encoder's rank alone finds a broken image; the loss is that of a run in which neither sample has targets."""
    at, never = spoilt(1)
    keys = ("--data.source", f"{Path(__file__).stem}:Spoilt", "--data.options.at", str(at), "--data.num_workers", "1")
    skip = (*keys, "--data.on_bad_sample", "skip", "--data.options.never", str(never))
    runs = {
        "skip": start_training(RECIPE, *overrides(tmp_path / "skip", *skip)),
        "masked": start_training(RECIPE, *overrides(tmp_path / "masked", *skip, "--data.options.masked", "true")),
        "stop": start_training(RECIPE, *overrides(tmp_path / "stop", *keys)),
    }
    outputs = {name: run.communicate(timeout=200) for name, run in runs.items()}
    assert {name: run.returncode for name, run in runs.items()} == {"skip": 0, "masked": 0, "stop": 1}, outputs
    assert f"sample 'digits/train/{at}': its image is broken" in outputs["stop"][1]
    assert "Traceback" not in outputs["stop"][1]
    for name, what in ((at, "image"), (never, "header")):
        assert f"step 2: skipped: sample 'digits/train/{name}': its {what} is broken" in outputs["skip"][0]
    lines = {
        name: [line for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open()) if "loss" in line]
        for name in ("skip", "masked")
    }
    assert [line.get("samples_skipped", 0) for line in lines["skip"]] == [0, 2, 0]
    assert json.loads((tmp_path / "skip" / "summary.json").read_text())["samples_skipped"] == 2
    for mine, other in zip(lines["skip"], lines["masked"], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_trainer_that_is_killed_while_it_takes_a_tensor_leaves_no_traceback_of_the_loader(capsys):
    """Found by `soak.py kills`, in 2 of 200: the thread of multiprocessing that hands tensors over printed one."""
    payload_workers._without_lost_connections(
        ConnectionResetError, ConnectionResetError(104, "Connection reset by peer"), None
    )
    assert capsys.readouterr().err == ""
    payload_workers._without_lost_connections(ValueError, ValueError("a fault"), None)
    assert "ValueError: a fault" in capsys.readouterr().err
