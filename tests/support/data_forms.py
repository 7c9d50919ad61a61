"""The forms in which users have conversations, each written small: eight samples of an image, and what it shows."""

from __future__ import annotations

import base64
import csv
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ANSWERS = ["a cat", "a dog"] * 4
ASKED = "what is this"


def picture(i: int) -> bytes:
    """A PNG of random pixels."""
    buffer = io.BytesIO()
    draw = np.random.default_rng(i)
    Image.fromarray(draw.integers(0, 256, (9 + i, 14, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _pictures(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(len(ANSWERS)):
        (folder / f"{i}.png").write_bytes(picture(i))
    return [f"{i}.png" for i in range(len(ANSWERS))]


def _url(i: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture(i)).decode()}"


def _chat(part: Mapping[str, Any], answer: str) -> dict[str, Any]:
    asked = [part, {"type": "text", "text": ASKED}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def _lines(path: Path, records: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    """A tar shard with these members."""
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import datasets

    datasets.Dataset.from_list(list(rows)).to_parquet(path)


def _csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def llava(folder: Path) -> None:
    names = _pictures(folder / "images")
    turns = [[{"from": "human", "value": f"<image>\n{ASKED}"}, {"from": "gpt", "value": each}] for each in ANSWERS]
    records = [{"id": n, "image": f"images/{n}", "conversations": t} for n, t in zip(names, turns, strict=True)]
    (folder / "llava.json").write_text(json.dumps(records))


def openai(folder: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": _url(i)}} for i in range(len(ANSWERS))]
    _lines(folder / "train.jsonl", [_chat(part, each) for part, each in zip(parts, ANSWERS, strict=True)])


def transformers(folder: Path) -> None:
    parts = [{"type": "image", "path": name} for name in _pictures(folder)]
    (folder / "chats.json").write_text(json.dumps([_chat(p, each) for p, each in zip(parts, ANSWERS, strict=True)]))


def questions(folder: Path) -> None:
    names = _pictures(folder)
    pairs = zip(names, ANSWERS, strict=True)
    _lines(folder / "qa.jsonl", [{"image": name, "question": ASKED, "answer": answer} for name, answer in pairs])


def webdataset(folder: Path) -> None:
    members: dict[str, bytes] = {}
    for i, answer in enumerate(ANSWERS):
        record = _chat({"type": "image", "image": "png"}, answer)
        members |= {f"{i}.json": json.dumps(record).encode(), f"{i}.png": picture(i)}
    write_tar(folder / "shard-000.tar", members)


def img2dataset(folder: Path) -> None:
    members: dict[str, bytes] = {}
    for i, answer in enumerate(ANSWERS):
        key = f"{i:09}"
        meta = {"caption": "what is", "url": "https://example.org/x.png", "key": key, "status": "success", "exif": "{}"}
        members |= {f"{key}.png": picture(i), f"{key}.txt": answer.encode(), f"{key}.json": json.dumps(meta).encode()}
    for shard in range(2):
        half = dict(list(members.items())[12 * shard : 12 * shard + 12])
        write_tar(folder / f"{shard:05}.tar", half)
        (folder / f"{shard:05}_stats.json").write_text('{"count": 4, "successes": 4}')
        _table(folder / f"{shard:05}.parquet", [{"url": "https://example.org", "caption": "a cat", "key": "0"}])


def the_cauldron(folder: Path) -> None:
    rows = [
        {
            "images": [{"bytes": picture(i), "path": None}],
            "texts": [{"user": ASKED, "assistant": each, "source": "pets"}],
        }
        for i, each in enumerate(ANSWERS)
    ]
    _table(folder / "train-00000-of-00001.parquet", rows)


def vqa(folder: Path) -> None:
    def row(i: int, answer: str) -> dict[str, Any]:
        given = ["a", answer, answer]
        answers = [{"answer": each, "answer_confidence": "yes", "answer_id": k} for k, each in enumerate(given)]
        return {
            "image": {"bytes": picture(i), "path": "x.png"},
            "question": ASKED,
            "answers": answers,
            "question_id": i,
        }

    rows = [row(i, each) for i, each in enumerate(ANSWERS)]
    (folder / "data").mkdir()
    for name, part in (("train", rows[:6]), ("validation", rows[6:]), ("test", rows[6:])):
        _table(folder / "data" / f"{name}-00000-of-00001.parquet", part)


def imagefolder(folder: Path) -> None:
    for split, part in (("train", ANSWERS[:6]), ("validation", ANSWERS[6:])):
        names = _pictures(folder / split)
        _csv(folder / split / "metadata.csv", [{"file_name": n, "text": a} for n, a in zip(names, part, strict=False)])


def separated(folder: Path) -> None:
    names = _pictures(folder / "images")
    rows = [{"image": f"images/{n}", "question": ASKED, "answer": a} for n, a in zip(names, ANSWERS, strict=True)]
    _csv(folder / "pets.tsv", rows)


FORMS: Mapping[str, Callable[[Path], None]] = {
    "LLaVA": llava,
    "OpenAI": openai,
    "transformers": transformers,
    "JSON lines of questions": questions,
    "webdataset": webdataset,
    "img2dataset": img2dataset,
    "the_cauldron": the_cauldron,
    "VQA": vqa,
    "imagefolder": imagefolder,
    "TSV": separated,
}
"""By name: writes the form into an empty folder, which is what `hetmesh init --data` gets."""

CAPTIONS = ("img2dataset", "imagefolder")
"""Forms without questions."""
