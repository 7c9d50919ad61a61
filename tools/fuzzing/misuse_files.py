"""Broken data files and folders: conversations, images, recordings, run folders."""

from __future__ import annotations

import json
import random
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hetmesh.cli import main as hetmesh
from hetmesh.data import make_source
from hetmesh.data.recipe_sources import SOURCES
from word_tokenizer import save_word_tokenizer

WORDS = ["<unk>", "<s>", "</s>", "<image>", "<audio>", "USER:", "ASSISTANT:", "what", "cat", "dog"]
JUNK: tuple[Any, ...] = (None, 3, -1, 1.5, "", "x", [], [3], {}, {"a": 1}, True, "user", "<image>", [None], [[]])


def files(rng: random.Random, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Endless uses of broken files, each with a description."""
    root = folder / "data"
    _prepare(root)
    calls = (_conversation, _conversation, _conversation, _directory, _options, _run_folder)
    while True:
        yield rng.choice(calls)(rng, root)


def _prepare(root: Path) -> None:
    from PIL import Image

    root.mkdir()
    save_word_tokenizer(root / "tokenizer", WORDS, ["<image>", "<audio>"])
    processor = {"size": 8, "crop_size": 8, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (root / "images").mkdir()
    (root / "images" / "preprocessor_config.json").write_text(
        json.dumps({**processor, "image_processor_type": "CLIPImageProcessor", "do_resize": True})
    )
    Image.new("RGB", (9, 12)).save(root / "good.png")
    data = (root / "good.png").read_bytes()
    (root / "cut.png").write_bytes(data[: len(data) // 2])
    (root / "empty.png").write_bytes(b"")
    (root / "text.png").write_text("no picture")
    Image.new("L", (1, 1)).save(root / "grey.png")
    with wave.open(str(root / "good.wav"), "wb") as file:
        file.setparams((1, 2, 1600, 0, "NONE", ""))
        file.writeframes(b"\0\0" * 100)
    (root / "cut.wav").write_bytes((root / "good.wav").read_bytes()[:30])


MEDIA = (
    *("good.png", "cut.png", "empty.png", "text.png", "grey.png", "none.png"),
    *("good.wav", "cut.wav", ".", "tokenizer", "", "\0", "../data/good.png", "x" * 300),
)


def _conversation(rng: random.Random, root: Path) -> tuple[str, Callable[[], object]]:
    part = {"type": "image", "image": rng.choice(MEDIA)}
    turn: dict[str, Any] = {
        "role": "user",
        "content": rng.choice(["what cat", [part, {"type": "text", "text": "what"}]]),
    }
    record: dict[str, Any] = {"id": "a", "messages": [turn, {"role": "assistant", "content": "dog"}]}
    how = rng.choice(["file", "field", "drop", "part", "line"])
    if how == "field":
        rng.choice([record, turn, part])[rng.choice(["id", "messages", "role", "content", "type", "image"])] = (
            rng.choice(JUNK)
        )
    if how == "drop":
        target = rng.choice([record, turn, part])
        target.pop(rng.choice(list(target)))
    if how == "part":
        turn["content"] = [
            rng.choice([*JUNK, {"type": rng.choice(["image", "audio", "video", "text"]), "audio": rng.choice(MEDIA)}])
        ]
    text = json.dumps(record)
    if how == "line":
        text = rng.choice(
            [text[: rng.randrange(len(text))], "", "[]", "3", "null", text + "x", '{"id": 1}', "\ufeff" + text]
        )
    with_audio = rng.random() < 0.3

    def call() -> None:
        file = root / "conversations.jsonl"
        file.write_text(text + "\n", encoding="utf-8")
        options: dict[str, Any] = {
            "path": str(file),
            "tokenizer": str(root / "tokenizer"),
            "image_processor": str(root / "images"),
        }
        if with_audio:
            options |= {"placeholders": {"image": "<image>", "audio": "<audio>"}}
        source = make_source("conversations", **options)
        for index in range(len(source)):
            source.meta(index)
            source.load(index)

    return f"conversation {text[:300]}", call


def _directory(rng: random.Random, root: Path) -> tuple[str, Callable[[], object]]:
    """Directories of tokenizers and processors with files that are cut off or hold something else."""
    kind = rng.choice(["tokenizer", "images"])
    name = rng.choice([p.name for p in sorted((root / kind).iterdir())])
    original = (root / kind / name).read_bytes()
    data = rng.choice(
        [
            b"",
            b"{}",
            b"[]",
            b"null",
            b"\xff\xfe",
            original[: rng.randrange(len(original))],
            b'{"size": "x"}',
            b'{"size": -3}',
        ]
    )

    def call() -> None:
        broken = root / f"broken_{kind}"
        broken.mkdir(exist_ok=True)
        for each in (root / kind).iterdir():
            (broken / each.name).write_bytes(data if each.name == name else each.read_bytes())
        options = {"tokenizer": root / "tokenizer", "image_processor": root / "images"}
        options["tokenizer" if kind == "tokenizer" else "image_processor"] = broken
        line = {
            "id": "a",
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "good.png"}]},
                {"role": "assistant", "content": "dog"},
            ],
        }
        (root / "good.jsonl").write_text(json.dumps(line) + "\n")
        source = make_source("conversations", path=str(root / "good.jsonl"), **{k: str(v) for k, v in options.items()})
        source.meta(0)
        source.load(0)

    return f"{kind}/{name} = {data[:60]!r}", call


def _options(rng: random.Random, root: Path) -> tuple[str, Callable[[], object]]:
    """Options of sources, of any type."""
    import inspect

    name = rng.choice([*SOURCES, "hetmesh.testing.sources:RandomMedia", "os:getcwd", "hetmesh.errors:HetmeshError"])
    keys = list(inspect.signature(SOURCES[name]).parameters) if name in SOURCES else ["kinds", "seed", "max_items"]
    good = {"path": str(root / "good.jsonl"), "tokenizer": str(root / "tokenizer"), "kinds": {"image": [1, 8, 8]}}
    options: dict[str, Any] = {key: good[key] for key in keys if key in good}
    for key in rng.sample(keys, min(len(keys), rng.randint(1, 2))):
        options[key] = rng.choice(JUNK)

    def call() -> None:
        source = make_source(name, **options)
        source.meta(0)
        source.load(0)

    return f"make_source({name!r}, {options})", call


def _run_folder(rng: random.Random, root: Path) -> tuple[str, Callable[[], object]]:
    """Reports of run folders that hold something else."""
    name = rng.choice(["metrics.jsonl", "timeline.json", "recipe.toml", "other"])
    data = rng.choice(["", "{}", "[]", "null", "{", "3\n{}", '{"step": "x"}\n', '{"step": 1}\n{"step": 1}\n', "\0"])

    def call() -> None:
        folder = root / "run"
        folder.mkdir(exist_ok=True)
        for each in folder.iterdir():
            each.unlink()
        (folder / name).write_text(data)
        hetmesh(["report", str(folder)])

    return f"report of a folder with {name} = {data!r}", call
