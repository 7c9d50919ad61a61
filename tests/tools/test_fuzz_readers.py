"""Spoiled files meet only the project's own errors: a sample of `tools/fuzz.py readers`, and a case of each finding."""

import contextlib
import importlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import tarfile
import zipfile
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from PIL import Image

from hetmesh.checkpoint.reading import Planner
from hetmesh.cost import Profile, load_machine
from hetmesh.data import chat_template
from hetmesh.data.digits import read_digit
from hetmesh.data.images import ImageProcessor
from hetmesh.data.media_reader import RecordingProcessor
from hetmesh.data.metadata_index import load_index
from hetmesh.data.stores.columns import Columns
from hetmesh.data.stores.open_store import Tables
from hetmesh.data.stores.store import npy_shape
from hetmesh.data.stores.tar_shards import TarShards
from hetmesh.errors import CheckpointError, HetmeshError, RecipeError, SampleError
from hetmesh.export.directory_files import copy_files
from hetmesh.files import from_json, place_in, read_file
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.recipe.overrides import parse_overrides
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.records.checksums import METADATA, Checksum, Reader, read_metadata

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
        found = [fuzzer.read(number) for number in range(1, 100) if number % 50]
    assert [each for each in found if each[3] == "offends"] == []
    assert {each[0] for each in found} == set(fuzzer.kinds)
    assert sum(each[3] == "refused" for each in found) > 40


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
    for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "index.npz", "w", how) as file:
            file.writestr("tokens.npy", header)
        with pytest.raises(RecipeError, match="is damaged"):
            load_index(tmp_path / "index.npz", {})


def test_processors_of_impossible_sizes_are_refused(tmp_path):
    config = {"image_processor_type": "CLIPImageProcessor", "size": 8, "crop_size": 8}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    for size in ({"height": 1, "width": 10**12}, {"shortest_edge": -1}, {"shortest_edge": "x"}, 0):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**config, "size": size}))
        with pytest.raises(RecipeError, match="key = "):
            ImageProcessor(tmp_path, "key")


@pytest.mark.parametrize("key", ["feature_size", "chunk_length", "n_fft", "hop_length", "sampling_rate"])
def test_extractors_without_bounds_are_refused(key, tmp_path):
    for value in (10**12, -1, 0, "x", float("inf")):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: value}))
        with pytest.raises(RecipeError, match="must be positive whole numbers"):
            RecordingProcessor(tmp_path, "key")


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


class PicklerOfPython311(pickle.Pickler):
    """Members of enums as Python 3.11.0 to 3.11.3 pickle them: by `getattr`."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_checkpoints_of_early_python_3_11_are_read(tmp_path):
    dcp.save({"model.a": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = Reader(tmp_path).read_metadata()
    with (tmp_path / METADATA).open("wb") as file:
        PicklerOfPython311(file).dump(metadata)
    assert b"getattr" in (tmp_path / METADATA).read_bytes()
    assert Reader(tmp_path).read_metadata().state_dict_metadata == metadata.state_dict_metadata
    (tmp_path / METADATA).write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nX\x05\x00\x00\x00numeltR.")
    with pytest.raises(pickle.UnpicklingError, match=r"numel of .*Size"):
        Reader(tmp_path).read_metadata()


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
    process = "src/hetmesh/verify/self_check_process.py"
    line = r'print(*compare(resolve(pickle.load(sys.stdin.buffer))), sep="\n", file=findings)'
    assert found == {f"{process}: {line}"}  # our own recipe, by a pipe


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        (b"Nr" + (2**32 - 1).to_bytes(4, "little"), "no index"),
        (pickle.BYTEARRAY8 + (2**62).to_bytes(8, "little"), "KeyError"),
    ],
    ids=["memo", "array"],
)
def test_an_index_takes_no_memory_for_a_number_in_it(tmp_path, claim, says):
    """The unpickler in C makes room for as many objects as the highest number that one of them is given, that in Python
    for as many bytes as an array claims to have."""
    (tmp_path / METADATA).write_bytes(b"\x80\x05" + claim + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=says):
        read_metadata(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB


def compared(content):
    """What DCP's reader gets of bytes whose checksum is right."""
    return Checksum(xxhash.xxh3_64_hexdigest(content.getvalue())).transform_from(io.BytesIO(content.getvalue()))


def test_values_that_are_packed_are_refused():
    stored, packed = io.BytesIO(), io.BytesIO()
    torch.save({"a": 1}, stored)
    assert compared(stored).read() == stored.getvalue()
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for each in old.infolist():
            new.writestr(each.filename, old.read(each))
    with pytest.raises(pickle.UnpicklingError, match="packed"):
        compared(packed)


@pytest.mark.parametrize(
    ("field", "value"),
    [(slice(124, 136), b"\xff" * 11 + b"\x00"), (slice(156, 157), b"S"), (slice(0, 4), b"\xff\xfe.j")],
    ids=["negative size", "sparse", "no UTF-8"],
)
def test_headers_of_tar_members_that_are_none(field, value, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as shard:
        for name in ("a.json", "b.json"):
            shard.addfile(tarfile.TarInfo(name))
    data = bytearray((tmp_path / "a.tar").read_bytes())
    second = data[512:1024]
    second[field] = value
    second[148:156] = b" " * 8
    second[148:156] = b"%06o\0 " % sum(second)
    (tmp_path / "a.tar").write_bytes(data[:512] + second + data[1024:])
    store = TarShards([tmp_path / "a.tar"], "key", Columns())
    with pytest.raises(SampleError):
        store.record(len(store) - 1)


def test_a_template_comes_to_an_end(monkeypatch):
    from jinja2 import Environment

    monkeypatch.setattr(chat_template, "MAX_TRIAL_SECONDS", 0.2)
    loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    endless = Environment().from_string(loops)
    with pytest.raises(RecipeError, match="comes to no end"), chat_template.time_limit(loops, "key"):
        _tried(endless)
    with pytest.raises(RecipeError, match="power"), chat_template.time_limit("{{ 9 ** 9 }}", "key"):
        pass
    with chat_template.time_limit("{{ f(**a) }} ** {{ f(1, **a) }}", "key"):
        pass


def _tried(template):
    for _ in range(2):
        with contextlib.suppress(Exception):  # which are taken for the template's refusals
            template.render()


def test_links_out_of_a_directory_are_not_copied(tmp_path):
    for name in ("model", "secret", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret" / "key").write_text("")
    (tmp_path / "model" / "tokenizer.json").write_text("")
    (tmp_path / "model" / "vocab.txt").symlink_to(tmp_path / "secret" / "key")
    found = copy_files(Pretrained(tmp_path / "model", "key"), tmp_path / "out")
    assert (found, os.listdir(tmp_path / "out")) == ((1, ["vocab.txt"]), ["tokenizer.json"])


def test_a_saved_table_names_only_files_of_its_own(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"messages": "[]"}]).save_to_disk(tmp_path / "a")
    state = json.loads((tmp_path / "a" / "state.json").read_text())
    shutil.move(tmp_path / "a" / state["_data_files"][0]["filename"], tmp_path / "b.arrow")
    state["_data_files"][0]["filename"] = "../b.arrow"
    (tmp_path / "a" / "state.json").write_text(json.dumps(state))
    with pytest.raises(RecipeError, match="lies outside of"):
        Tables([tmp_path / "a"], (), "key", Columns())


@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1", "true"])
def test_machines_and_profiles_hold_numbers_that_can_be_reckoned_with(value, tmp_path):
    (tmp_path / "a.toml").write_text(f"memory_bytes = {value}")
    with pytest.raises(RecipeError, match="memory_bytes must be a number"):
        load_machine(str(tmp_path / "a.toml"))
    held = {"mean": {"nan": float("nan"), "inf": float("inf"), "true": True}.get(value, value)}
    content = {"layers": {}, "held_out": held, "dtype": "float32", "device": "cpu"}
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(HetmeshError, match="mean must be a number"):
        Profile.load(tmp_path / "p.json")


def test_eps_files_are_programs(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.eps")
    with pytest.raises(SampleError, match="program"):
        read_digit(tmp_path / "a.eps")


def test_inputs_are_drawn_by_seed_and_number(load, tmp_path):
    mutations = load("fuzzing.mutations")
    (tmp_path / "outside").mkdir()
    told = []
    for _ in range(2):
        (tmp_path / "a.json").write_text('{"a": [1, 2], "b": {"c": 3}}')
        place = mutations.Place(tmp_path / "a.json", tmp_path / "outside")
        told.append((mutations.mutate(random.Random("7/3"), place), (tmp_path / "a.json").read_bytes()))
    assert told[0] == told[1]


def test_relative_folders_are_those_of_the_current_directory(tmp_path, monkeypatch):
    """What one was found to be elsewhere once stayed, and data were refused as outside of their folder."""
    for place, folder in (("a", "data"), ("b", "data/images"), ("b", "data")):
        (tmp_path / place / "data" / "images").mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "data" / "images" / "0.png").write_text("")
        monkeypatch.chdir(tmp_path / place)
        name = "images/0.png" if folder == "data" else "0.png"
        assert place_in([Path(folder)], name) == Path("data/images/0.png")
