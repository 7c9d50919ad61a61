"""Conversations that a directory's own processor prepares: their index, and processes that load them."""

import json
import os
import shutil
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest
from PIL import Image

import hetmesh.data.conversations
from hetmesh._processes import threads
from hetmesh.data import Loader, make_source
from hetmesh.data.metadata_index import build_index
from hetmesh.data.payload_workers import InWorkers
from hetmesh.data.payloads import SplitSources, Wanted
from hetmesh.errors import RecipeError
from support.tiny_processors import save as save_tiny_processor

SIZES = ((60, 90), (150, 75), (200, 300), (60, 90))


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    """Of a source of four conversations about an image each."""
    (tmp_path / "media").mkdir()
    lines = []
    for i, (width, height) in enumerate(SIZES):
        Image.new("RGB", (width, height), (i, 2 * i, 90)).save(tmp_path / "media" / f"{i}.png")
        asked = [{"type": "image", "image": f"media/{i}.png"}, {"type": "text", "text": "what is it"}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "a plain " * i + "colour"}]
        lines.append(json.dumps({"id": f"s{i}", "messages": turns}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    folder = save_tiny_processor("qwen2_5_vl", tmp_path / "model")
    return {"path": str(tmp_path / "data.jsonl"), "processor": str(folder)}


def test_with_an_index_a_plan_opens_no_media(options, tmp_path) -> None:
    """They are not even there."""
    source = make_source("conversations", **options)
    metas = [source.meta(i) for i in range(len(SIZES))]
    assert len({item.rows for meta in metas for item in meta.media}) > 1
    build_index(source)
    shutil.rmtree(tmp_path / "media")
    indexed = make_source("conversations", **options)
    assert [indexed.meta(i) for i in range(len(SIZES))] == metas
    batch = Loader(indexed, len(SIZES), shuffle=False).batch(0)
    assert [drawn.meta for drawn in batch] == metas


def test_an_index_is_stale_when_the_processor_changes(options, tmp_path, monkeypatch) -> None:
    build_index(make_source("conversations", **options))
    with pytest.raises(RecipeError, match="stale: the options of"):
        make_source("conversations", **options, processor_options={"max_pixels": 6272})
    with monkeypatch.context() as patch:
        patch.setattr(hetmesh.data.conversations, "version", lambda _: "5.18.0")
        with pytest.raises(RecipeError, match="stale: the options of"):
            make_source("conversations", **options)
    make_source("conversations", **options)
    file = tmp_path / "model" / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"]["size"]["longest_edge"] *= 4
    file.write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="stale: tokenizer or processors changed"):
        make_source("conversations", **options)


def forked(options: str) -> int:
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    sources = SplitSources({"train": partial(make_source, "conversations", **json.loads(options))})
    before = threads()
    metas = [sources["train"].meta(i) for i in range(4)]
    assert threads() == before == 1, (before, threads())
    with InWorkers(sources, 1) as payloads:
        samples = payloads.get([Wanted("train", i) for i in range(4)])
        assert forkserver._forkserver._forkserver_pid is None
    assert [len(sample.tokens) for sample in samples] == [meta.tokens for meta in metas]
    return 0


@pytest.mark.slow
def test_workers_are_forked_after_a_processor_was_used(options, start_forked) -> None:
    process = start_forked(forked, json.dumps(options), environment={"OPENBLAS_NUM_THREADS": "1"})
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
