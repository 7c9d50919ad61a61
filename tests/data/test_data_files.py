"""`hetmesh check` looks for the files that samples name."""

import io
import json
import tarfile

import pytest
from test_data_conversations import image, root, talk, text  # noqa: F401

from hetmesh.cli.check import checked
from hetmesh.data.recipe_sources import recipe_source
from hetmesh.errors import RecipeError, SampleError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve import samples
from hetmesh.resolve.resolved import resolve

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def recipe(folder, path, **keys):
    data = {"path": str(path), "tokenizer": str(folder / "tokenizer"), "image_processor": str(folder / "clip")}
    tables = {
        "modules": {
            "vision": {"model": "siglip", "config": SIZES | {"image_size": 8, "patch_size": 4}},
            "projector": {"model": "mlp"},
            "llm": {"model": "qwen3", "config": SIZES | {"head_dim": 4}},
        },
        "boundaries": [{"from": "vision", "to": "projector"}, {"from": "projector", "to": "llm", "at": "image"}],
        "data": {"source": "conversations", "options": data} | keys.pop("data", {}),
        "training": {"local_batch_size": 2, "steps": 4},
    }
    return parse_recipe(tables | keys)


def lines(folder, *names):
    records = [talk([image(name), text("what")], "a cat") | {"id": name} for name in names]
    (folder / "named.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder / "named.jsonl"


def test_a_file_that_is_missing_is_refused_unless_it_is_to_be_skipped(root, monkeypatch):  # noqa: F811
    opened = []
    monkeypatch.setattr("PIL.Image.open", lambda *_: opened.append(1))
    path = lines(root, "wide.png", "gone.png", "tall.png")
    with pytest.raises(RecipeError, match=r"\[data\] 1 of 3 samples cannot be read: sample 'gone\.png': cannot "):
        checked(recipe(root, path))
    said = checked(recipe(root, path, data={"on_bad_sample": "skip"}))[1]
    assert any("sample 'gone.png': cannot read" in line and "leaves them out" in line for line in said)
    checked(recipe(root, lines(root, "wide.png", "tall.png")))
    held_out = {"options": recipe(root, path).data.options | {"validation_path": str(lines(root, "gone.png"))}}
    good = root / "good.jsonl"
    good.write_text(json.dumps(talk([image("wide.png"), text("what")], "a cat")))
    held_out["options"]["path"] = str(good)
    with pytest.raises(RecipeError, match="1 of 1 validation sample cannot be read"):
        checked(recipe(root, good, data=held_out))
    assert not opened


def test_only_what_the_run_reads_is_looked_for(root, monkeypatch):  # noqa: F811
    names = ["gone.png", *["wide.png"] * 30]
    path = lines(root, *names)
    given = recipe(root, path)
    drawn = set(samples.in_order_of_training(resolve(given)))
    if 0 in drawn:
        path = lines(root, *reversed(names))
    checked(recipe(root, path))
    monkeypatch.setattr(samples, "MAX_SAMPLES_CHECKED", 5)
    assert "note: files were looked for of the first 5 samples that the run reads" in checked(recipe(root, path))[1]


def test_members_of_a_shard_are_found_by_its_index(root, tmp_path):  # noqa: F811
    shard = tmp_path / "shard.tar"
    with tarfile.open(shard, "w") as archive:
        for key, media in (("a", "png"), ("b", "jpg")):
            record = json.dumps(talk([image("png"), text("what")], "a cat") | {"id": key}).encode()
            for name, data in ((f"{key}.json", record), (f"{key}.{media}", (root / "wide.png").read_bytes())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    shards = recipe_source(recipe(root, shard).data)
    shards.check_files(0)
    with pytest.raises(SampleError, match=r"sample 'b': there is no member 'png'"):
        shards.check_files(1)
