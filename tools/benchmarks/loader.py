"""Samples per second with worker processes against a plain torch DataLoader over the same tar shards, and bytes read.

Images of 224 to 1,024 pixels and a conversation about each are written into tar shards in a temporary folder. Both
sides read them by offset, decode them, and call the same processor of transformers (LLaVA's, 336 x 336 pixels) with the
conversation, in as many worker processes, in the same order, into batches of the same size, whose images are one
tensor. Both go through all images
several times, a few batches of the one and a few of the other in turns, so that what else the machine does slows both.
The ratio is the median over turns; CPU time, which depends less on other processes, is shown beside it. Workers start
before, and each side's first batches do not count. While a side has no turn its workers fill their queues, of the same
length, and stop.

Bytes are those that the kernel says the worker processes read (`rchar` in /proc), requests included, over the stored
size of the samples.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from hetmesh.data import Loader, make_source
from hetmesh.data.metadata_index import build_index
from hetmesh.data.payload_workers import InWorkers
from hetmesh.data.payloads import SplitSources
from hetmesh.models.split.batching import Cat
from surveying.tiny_config import make_tiny
from surveying.tiny_processor import default_config, fit_config, save_processor

JUDGES = ("src/hetmesh/data", *(f"src/hetmesh/models/split/{name}.py" for name in ("from_sizes", "made", "processor")))
"""What an output of it judges (`kept.py`)."""

SMALLEST, LARGEST = 224, 1024
PER_SHARD = 250
SIDES = ("dataloader", "hetmesh")
SIDE = 336


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many images, workers and passes."""
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--passes", type=int, default=3, help="through all images, by new processes each")
    parser.add_argument("--turn", type=int, default=25, help="batches that a side loads before the other's turn")


@dataclass
class Pass:
    """What one pass through all images measured, by side: seconds of each turn, and CPU seconds of all of it,
    this process and workers; and of hetmesh's workers, bytes read over bytes needed."""

    seconds: dict[str, list[float]]
    cpu: dict[str, float]
    over: float


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the data, and run both sides in turns."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hetmesh-loader-") as name:
        folder = Path(name)
        write_data(folder, args.images)
        options = {"path": str(folder / "*.tar"), "processor": str(folder / "processor")}
        build_index(make_source("conversations", **options))
        passes = [take_turns(folder, options, args) for _ in range(args.passes)]
    seconds = {side: [each for one in passes for each in one.seconds[side]] for side in SIDES}
    cpu = {side: 1000 * sum(one.cpu[side] for one in passes) / args.passes / args.images for side in SIDES}
    ratios = [plain / own for plain, own in zip(seconds["dataloader"], seconds["hetmesh"], strict=True)]
    count = args.turn * args.batch
    return {
        "images": args.images,
        "workers": args.workers,
        "turns": len(ratios),
        "samples_per_s": round(count / statistics.median(seconds["hetmesh"]), 1),
        "dataloader_samples_per_s": round(count / statistics.median(seconds["dataloader"]), 1),
        "ratio_vs_dataloader": round(statistics.median(ratios), 4),
        "cpu_ms_per_sample": round(cpu["hetmesh"], 3),
        "dataloader_cpu_ms_per_sample": round(cpu["dataloader"], 3),
        "bytes_over_needed": round(max(one.over for one in passes), 4),
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    return "\n".join(f"{key:26} {value}" for key, value in result.items())


def write_data(folder: Path, images: int) -> None:
    """Tar shards of images and conversations, and LLaVA's processor with a tokenizer of bytes."""
    save_processor("llava", fit_config("llava", make_tiny(default_config("llava"))), folder / "processor")
    file = folder / "processor" / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"] |= {"crop_size": {"height": SIDE, "width": SIDE}, "size": {"shortest_edge": SIDE}}
    file.write_text(json.dumps(config))
    draw = random.Random(0)
    grid = np.mgrid[0 : 2 * LARGEST, 0 : 2 * LARGEST] / 40
    waves = np.stack([np.sin(grid[0]), np.cos(grid[1]), np.sin(grid[0] * grid[1] / 20)], -1)
    canvas = 127 + 90 * waves + np.random.default_rng(0).normal(0, 12, waves.shape)
    picture = Image.fromarray(canvas.clip(0, 255).astype(np.uint8))
    turns = [
        {"role": "user", "content": [{"type": "image", "image": "jpg"}, {"type": "text", "text": "what is this"}]},
        {"role": "assistant", "content": "a picture"},
    ]
    for shard in range(0, images, PER_SHARD):
        with tarfile.open(folder / f"shard-{shard:06}.tar", "w") as archive:
            for i in range(shard, min(shard + PER_SHARD, images)):
                width, height = draw.randint(SMALLEST, LARGEST), draw.randint(SMALLEST, LARGEST)
                left, top = draw.randrange(LARGEST), draw.randrange(LARGEST)
                data = io.BytesIO()
                picture.crop((left, top, left + width, top + height)).save(data, "JPEG", quality=85)
                record = json.dumps({"id": f"{i:06}", "messages": turns}).encode()
                for name, content in ((f"{i:06}.json", record), (f"{i:06}.jpg", data.getvalue())):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))


class Plain(Dataset):
    """What one would write by hand: an image of a tar shard by its offset, and the tokens of its conversation."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(folder / "processor")
        self.places: list[tuple[Path, int, int, int, int]] = []
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as archive:
                members = archive.getmembers()
            for text, image in zip(members[::2], members[1::2], strict=True):
                self.places.append((path, text.offset_data, text.size, image.offset_data, image.size))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, list[int]]:
        path, text_at, text_size, image_at, image_size = self.places[index]
        with path.open("rb") as file:
            file.seek(text_at)
            record = json.loads(file.read(text_size))
            file.seek(image_at)
            data = file.read(image_size)
        text = self.processor.apply_chat_template(record["messages"])
        with Image.open(io.BytesIO(data)) as image:
            made = self.processor(images=image, text=text, return_tensors="pt")  # which converts it
        return made["pixel_values"][0], made["input_ids"][0].tolist()


def _stacked(samples: list[tuple[torch.Tensor, list[int]]]) -> tuple[torch.Tensor, list[list[int]]]:
    return torch.stack([image for image, _ in samples]), [ids for _, ids in samples]


def take_turns(folder: Path, options: dict[str, str], args: argparse.Namespace) -> Pass:
    """One pass through all images."""
    steps = args.images // args.batch
    sources = SplitSources({"train": partial(make_source, "conversations", **options)})
    needed = 0
    with InWorkers(sources, args.workers, 2) as payloads:
        loader = Loader(sources["train"], args.batch, payloads=payloads)
        warm = [loader.wanted([each]) for each in loader.batch(0)[: args.workers]]
        payloads.announce(warm)  # one each: they import, and make their source
        for request in warm:
            payloads.get(request)
        own = {child.pid for child in multiprocessing.active_children()}
        before, cpu_before = _read_by(own), _cpu_of(own)
        batches = [loader.batch(step) for step in range(steps)]
        order = [drawn.index for batch in batches for drawn in batch]
        payloads.announce([loader.wanted(drawn) for drawn in batches])

        def ours() -> Iterator[torch.Tensor]:
            nonlocal needed
            for drawn in batches:
                samples = loader.load(drawn)
                needed += sum(sample.bytes_needed for sample in samples)
                units = [sample.units["image"] for sample in samples]
                yield Cat(0).join([unit["pixel_values"] for unit in units], units)  # as towers of the directory do

        plain = DataLoader(
            Plain(folder),
            args.batch,
            sampler=order,
            num_workers=args.workers,
            prefetch_factor=2,
            collate_fn=_stacked,
        )
        sides: dict[str, Iterator[Any]] = {"dataloader": iter(plain), "hetmesh": ours()}
        others = {child.pid for child in multiprocessing.active_children()} - own
        workers = {"dataloader": others, "hetmesh": own}
        for each in sides.values():
            next(each)
        cpu = {"dataloader": 0.0, "hetmesh": -cpu_before}  # of whole passes: what is loaded ahead has no turn
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        left = dict.fromkeys(SIDES, steps - 1)
        for turn in range(-(-(steps - 1) // args.turn)):
            for side in sorted(SIDES, reverse=turn % 2 == 1):
                count = min(args.turn, left[side])
                left[side] -= count
                started, before_main = time.perf_counter(), time.process_time()
                for _ in range(count):
                    next(sides[side])
                cpu[side] += time.process_time() - before_main
                if count == args.turn:  # the rest at the end is too short to count
                    seconds[side].append(time.perf_counter() - started)
        for side in SIDES:
            cpu[side] += _cpu_of(workers[side])
        return Pass(seconds, cpu, (_read_by(own) - before) / needed)


def _cpu_of(pids: set[int | None]) -> float:
    """CPU seconds that these processes have used so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _read_by(pids: set[int | None]) -> int:
    """Bytes that these processes have asked the kernel for so far."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += int(dict(line.split(": ") for line in lines)["rchar"])
    return total
