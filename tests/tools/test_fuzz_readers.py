"""Spoiled files meet only the project's own errors: a sample of `tools/fuzz.py readers`, and a case of each finding."""

import importlib
import io
import json
import pickle
import random
import re
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from PIL import Image

from hetmesh.data.images import ImageProcessor
from hetmesh.data.index import load_index
from hetmesh.data.npy import npy_shape
from hetmesh.data.recordings import RecordingProcessor
from hetmesh.data.tiles import tiling_of
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.files import from_json, place_in, read_file
from hetmesh.models.pretrained import Pretrained
from hetmesh.recipe.overrides import parse_overrides
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.training.checkpointing.reading import Planner
from hetmesh.training.checksums import METADATA, Reader, read_metadata

ROOT = Path(__file__).parents[2]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


@pytest.mark.slow
def test_spoiled_files_meet_only_the_projects_own_errors(load):
    """Without those that `hetmesh check` reads, which take a second each."""
    fuzzer = load("fuzzing.fuzz_readers")._Fuzzer(5, None)
    with fuzzer:
        found = [fuzzer.read(number) for number in range(1, 180) if number % 50]
    assert [each for each in found if each[3] == "offends"] == []
    assert {each[0] for each in found} == set(fuzzer.kinds)
    assert sum(each[3] == "refused" for each in found) > 80


def test_offenders_are_shown_with_the_fewest_edits_and_are_an_exit_status(load, monkeypatch, capsys):
    readers = load("fuzzing.fuzz_readers")
    kind = readers.KINDS["lengths"]

    def broken(folder, _):
        (folder / "lengths.jsonl").read_text(encoding="ascii").splitlines()[3]

    monkeypatch.setattr(readers, "KINDS", {"lengths": load("dataclasses").replace(kind, read=broken)})
    assert load("fuzz").main(["readers", "--n", "30", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert all(each["raised"].startswith(("IndexError", "Unicode", "FileNot", "IsADir")) for each in told["failures"])
    assert min(len(each["edits"]) for each in told["failures"]) == 1


def test_json_is_bounded_in_depth_and_characters():
    assert from_json(b"\xef\xbb\xbf" + b"[" * 100 + b"]" * 100)
    for text in ("[" * 101 + "]" * 101, '{"a":' * 5000 + "1" + "}" * 5000, '"\\ud800"'):
        with pytest.raises(ValueError):
            from_json(text)
    with pytest.raises(ValueError):
        from_json('["\ud800"]'.encode(errors="surrogatepass"))


def test_devices_are_no_files(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        read_file(tmp_path / "config.json")


def test_names_in_data_stay_in_the_folders_that_the_recipe_names(tmp_path):
    for folder in ("data", "other", "snapshots/1", "blobs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.png").write_text("")
    data, other, snapshot = tmp_path / "data", tmp_path / "other", tmp_path / "snapshots" / "1"
    (data / "link.png").symlink_to(other / "a.png")
    (data / "folder").symlink_to(other)
    (snapshot / "link.png").symlink_to(tmp_path / "blobs" / "a.png")
    for name in ("a.png", "x/../a.png", str(data / "a.png")):
        assert place_in([data], name).name == "a.png"
    for name in ("../other/a.png", str(other / "a.png"), "link.png", "folder/a.png", "/etc/hostname"):
        with pytest.raises(OSError, match="lies outside of"):
            place_in([data], name)
    for name in ("../other/a.png", "link.png", "folder/a.png"):
        assert place_in([data, other], name) == data / name
    assert place_in([snapshot], "link.png") == snapshot / "link.png"


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 5000 + "]" * 5000])
def test_toml_without_bounds_is_refused(value):
    with pytest.raises(RecipeError, match="not valid TOML"):
        parse_recipe(f"[training]\nsteps = {value}")
    assert list(parse_overrides([f"--job.description={value}"])) == [(("job", "description"), value)]


@pytest.mark.parametrize("shape", [(10**12,), (3, -1), (2**62, 8)])
def test_a_header_that_claims_more_than_the_file_is_refused(load, shape, tmp_path):
    header = load("fuzzing.mutations").npy_header(shape, "<f4")
    with pytest.raises(ValueError, match="its header says"):
        npy_shape(io.BytesIO(header), len(header))
    with pytest.raises(ValueError, match="its header says"):
        RecordingProcessor(None, "key")("a.npy", io.BytesIO(header))
    for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "index.npz", "w", how) as file:
            file.writestr("tokens.npy", header)
        with pytest.raises(RecipeError, match="is damaged"):
            load_index(tmp_path / "index.npz", {})


def test_slender_images_and_sizes_without_bounds_are_refused(tmp_path):
    slender = Image.new("1", (1, 60000))
    with pytest.raises(ValueError, match="at most"):
        ImageProcessor(224, None)(slender)
    with pytest.raises(ValueError, match="at most"):
        ImageProcessor((8, 8), None, pad_to_square=True)(slender)
    for size in (10**6, {"height": 1, "width": 10**12}, {"shortest_edge": -1}, {"shortest_edge": "x"}, 0):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": size}))
        with pytest.raises(RecipeError, match="must be positive"):
            ImageProcessor.from_directory(tmp_path, "key")
    tiles = {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "max_patches": 10**12}
    with pytest.raises(RecipeError, match="max_patches"):
        tiling_of(tiles, (8, 8), None, "file")


@pytest.mark.parametrize("key", ["feature_size", "chunk_length", "n_fft", "hop_length", "sampling_rate"])
def test_extractors_without_bounds_are_refused(key, tmp_path):
    for value in (10**12, -1, 0, "x", float("inf")):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: value}))
        with pytest.raises(RecipeError, match="must be positive whole numbers"):
            _ = RecordingProcessor(tmp_path, "key")._extractor


@pytest.mark.parametrize("stored", [{"a": ["x"]}, {"a": 3, "b": "x"}, [], "x", None])
def test_an_index_of_weights_without_file_names_is_refused(stored, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": stored}))
    with pytest.raises(RecipeError, match="must have a weight_map"):
        _ = Pretrained(tmp_path, "key").files


def test_checkpoints_run_no_code_and_stay_in_their_folder(load, tmp_path):
    opens = load("fuzzing.mutations").Opens(str(tmp_path / "made-by-code"))
    dcp.save({"model.a": torch.zeros(3), "extra": {"b": 1}}, checkpoint_id=tmp_path, no_dist=True)
    good = (tmp_path / METADATA).read_bytes()
    assert Reader(tmp_path).read_metadata() is not None
    for change in ("code", "name"):
        found = pickle.loads(good)
        if change == "code":
            found.extra = opens
        else:
            next(iter(found.storage_data.values())).relative_path = "../x"
        (tmp_path / METADATA).write_bytes(pickle.dumps(found))
        with pytest.raises(CheckpointError, match=r"io.open|no name of a file"):
            read_metadata(tmp_path)
    (tmp_path / METADATA).write_bytes(good)
    state = {"extra": {"b": 0}}
    dcp.load(state, storage_reader=Reader(tmp_path), planner=Planner(), no_dist=True)
    assert state == {"extra": {"b": 1}}
    evil = tmp_path / "evil"
    dcp.save({"extra": opens}, checkpoint_id=evil, no_dist=True)
    with pytest.raises(dcp.CheckpointException, match=r"[Ww]eights.only"):
        dcp.load({"extra": 0}, storage_reader=Reader(evil), planner=Planner(), no_dist=True)


def test_nothing_foreign_is_unpickled():
    """What a checkpoint or a directory holds is never read by a plain unpickler."""
    plain = re.compile(r"weights_only=False|pickle\.loads?\(|[^(]FileSystemReader\(str|checkpoint_id=str\(.*no_dist")
    found = {
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in (ROOT / "src").rglob("*.py")
        if file.parent.name != "testing"  # whose workers are our own
        for line in file.read_text(encoding="utf-8").splitlines()
        if plain.search(line)
    }
    assert found == {"src/hetmesh/training/api.py: recipe = pickle.load(sys.stdin.buffer)"}  # our own recipe, by a pipe


def test_inputs_are_drawn_by_seed_and_number(load, tmp_path):
    mutations = load("fuzzing.mutations")
    (tmp_path / "outside").mkdir()
    told = []
    for _ in range(2):
        (tmp_path / "a.json").write_text('{"a": [1, 2], "b": {"c": 3}}')
        place = mutations.Place(tmp_path / "a.json", tmp_path / "outside")
        told.append((mutations.mutate(random.Random("7/3"), place), (tmp_path / "a.json").read_bytes()))
    assert told[0] == told[1]
