"""U14: each kind of bad sample is one error with its id, whichever part of the job finds it first."""

from pathlib import Path

import pytest
import torch

from hetmesh.balance import plan_batch
from hetmesh.data.digits import DigitsSource
from hetmesh.data.loader import Loader
from hetmesh.data.source import Sample
from hetmesh.errors import SampleError
from hetmesh.graph import Stage
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models.draws import FIRST
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.feed import Feed

RECIPES = Path(__file__).parents[2] / "recipes"
IMAGE, TEXT = 1, 5


class OneBad:
    """Four samples of two images; `bad` changes sample 2: its metadata, its tokens and its images."""

    vocab_size, pad_id = 9, 0
    placeholders = {"image": IMAGE}  # noqa: RUF012

    def __init__(self, bad="none", split="train"):
        self.bad = BAD[bad]

    def __len__(self):
        return 4

    def sample(self, index):
        given = {
            "id": f"s{index}",
            "tokens": [TEXT, IMAGE, TEXT, IMAGE, TEXT, TEXT],
            "shapes": [(1, 8, 8)] * 2,
            "positions": [1, 3],
            "targets": ((4, 6),),
            "images": [torch.zeros(1, 8, 8)] * 2,
        }
        given["length"] = len(given["tokens"])
        return given | (self.bad if index == 2 else {})

    def meta(self, index):
        s = self.sample(index)
        items = zip(s["shapes"], s["positions"], strict=True)
        media = tuple(MediaItem(s.get("kind", "image"), shape, at) for shape, at in items)
        return SampleMeta(f"s{index}", s["length"], media, s["targets"])

    def load(self, index, kinds=None):
        s = self.sample(index)
        return Sample(s["id"], torch.tensor(s["tokens"]), {"image": s["images"]})


BAD = {
    "none": {},
    "an image less than placeholders": {"images": [torch.zeros(1, 8, 8)]},
    "an image more than placeholders": {"images": [torch.zeros(1, 8, 8)] * 3},
    "a placeholder without an image": {"tokens": [TEXT, IMAGE, TEXT, IMAGE, IMAGE, TEXT]},
    "a placeholder elsewhere": {"tokens": [TEXT, IMAGE, IMAGE, TEXT, TEXT, TEXT]},
    "an image of another shape": {"images": [torch.zeros(1, 8, 8), torch.zeros(1, 8, 16)]},
    "a shape that the encoder cannot read": {"shapes": [(1, 8, 8), (3, 8, 8)]},
    "media that no module reads": {"kind": "sound"},
    "another length": {"tokens": [TEXT, IMAGE, TEXT, IMAGE, TEXT]},
    "another id": {"id": "s7"},
    "a token outside the vocabulary": {"tokens": [TEXT, IMAGE, TEXT, IMAGE, TEXT, 9]},
    "media beyond the end": {"positions": [1, 6]},
    "media out of order": {"positions": [3, 1]},
    "a target on a placeholder": {"targets": ((3, 5),)},
    "a target at the start": {"targets": ((0, 2),)},
    "an image longer than seq_len": {
        "tokens": [IMAGE, TEXT, IMAGE, TEXT, TEXT, TEXT],
        "positions": [0, 2],
        "shapes": [(1, 8, 8)] * 2,
    },
}
SAYS = {
    "an image less than placeholders": "its payload has 1 'image' of shapes",
    "an image more than placeholders": "its payload has 3 'image' of shapes",
    "a placeholder without an image": "3 'image' placeholder tokens",
    "a placeholder elsewhere": "placeholder tokens .* are at positions",
    "an image of another shape": "its payload has 2 'image' of shapes",
    "a shape that the encoder cannot read": r"is configured for 'image' of shape \(1, 8, 8\), got \(3, 8, 8\)",
    "media that no module reads": "no module reads media of kind 'sound'",
    "another length": r"tokens are torch.int64 \[5\], its metadata promises torch.int64 \[6\]",
    "another id": "its payload has the id 's7'",
    "a token outside the vocabulary": r"token ids 1..9 must be in 0..8 \(vocab_size\)",
    "media beyond the end": "must lie in",
    "media out of order": "must lie in",
    "a target on a placeholder": "placeholder tokens .*cannot be targets",
    "a target at the start": "token 0 cannot be predicted",
    "an image longer than seq_len": "nothing fits into seq_len 3",
}


def load_everything(bad):
    """What all ranks of a job do until the first forward, here for all lanes in one process."""
    seq_len = "3" if "seq_len" in bad else "128"
    overrides = ("--data.source", "digits", "--training.local_batch_size", "4", "--training.seq_len", seq_len)
    recipe = load_recipe(RECIPES / "digits_overlapping.toml", overrides)
    resolved = resolve(recipe)
    graph = resolved.graph
    source = OneBad(bad)
    loader = Loader(source, 4, resolved.expander)
    drawn = next(loader)
    plan = plan_batch(graph, [d.meta for d in drawn], recipe.batch.microbatch_size)
    return [
        Feed(loader, drawn, plan, resolved.adapters, rank, FIRST)(Stage(name), m)
        for name in graph.order
        for rank in graph[name].mesh.ranks
        for m in range(plan.num_microbatches)
    ]


def test_the_good_samples_are_good():
    batches = load_everything("none")
    assert sum(len(batch["media"]) for batch in batches if "media" in batch) == 8
    assert sum(len(batch["targets"]) for batch in batches if "targets" in batch) == 8


@pytest.mark.parametrize("bad", SAYS)
def test_a_bad_sample_is_one_error_with_its_id(bad):
    with pytest.raises(SampleError, match=rf"^sample 's2': .*{SAYS[bad]}") as caught:
        load_everything(bad)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_hetmesh_train_ends_with_that_error(start_training, tmp_path):
    """On a rank that alone loads the sample, in a step of its own."""
    batch = 8
    bad = next(
        i
        for i in reversed(Loader(DigitsSource(), batch).indices(1))  # rank 1 encodes the second half
        if DigitsSource().meta(i).media
    )
    process = start_training(
        RECIPES / "digits.toml",
        *("--data.source", "support.faulty_sources:FaultyDigits", "--data.options.fault", "drop"),
        *("--data.options.at", str(bad), "--data.options.rank", "1", "--training.local_batch_size", str(batch)),
        *("--metrics.enable_tensorboard", "false", "--job.dump_folder", str(tmp_path)),
    )
    _, err = process.communicate(timeout=300)
    number = len(DigitsSource().meta(bad).media)
    assert err.startswith(
        f"error: rank 1: sample 'digits/train/{bad}': its payload has {number - 1} 'image' of shapes "
    )
    assert err.count("\n") == 1
    assert process.returncode == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
