"""Valid inputs of every reader, for `fuzz_readers` to spoil: a folder each, the files to change, and who reads them."""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
import wave
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hetmesh.checkpoint.saved_run import saved_run
from hetmesh.cli import main as hetmesh
from hetmesh.data import make_source
from hetmesh.data.metadata_index import build_index
from hetmesh.data.recipe_sources import recipe_source
from hetmesh.data.source import Source
from hetmesh.errors import HetmeshError
from hetmesh.files import read_file, to_json
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.recipe.recipe import load_recipe
from hetmesh.records import checksums
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve
from support import tiny_vlms
from support.recipes import draw_recipes

RECIPES = Path(__file__).parents[2] / "recipes"
WORDS = ["<pad>", "<|image_pad|>", "<unk>", "<|im_end|>", "user", "assistant", "what", "is", "this", "a", "cat", "dog"]
WORDS += ["<audio>", *(f"w{i}" for i in range(13, 43)), "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %} <|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %} <|im_end|> {% endfor %}"
)


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        base: which folder it is of.
        files: those that are changed, as patterns.
        read: reads a folder in which one was.
        share: how many of all inputs, in any unit.
        checked: whether `hetmesh check` of the folder's recipe.toml reads it too.
        prepare: makes what depends on where the folder is.
        links: whether some files become links to others outside of the folder.
    """

    base: str
    files: tuple[str, ...]
    read: Callable[[Path, random.Random], object]
    share: int
    checked: bool = False
    prepare: Callable[[Path], object] = lambda folder: None
    links: bool = False


def make_bases(root: Path) -> None:
    """The folders that inputs are made of, in `root`; and `root/outside`, which none may reach."""
    for make in (_recipes, _project, _run, _checkpoint):
        folder = root / make.__name__.removeprefix("_")
        folder.mkdir()
        make(folder)
    outside = root / "outside"
    outside.mkdir()
    project = root / "project"
    for file in (*(project / "data").iterdir(), *(project / "model").iterdir()):
        shutil.copy(file, outside / file.name)
    shutil.copy(project / "data" / "a.png", outside / "secret.png")
    for suffix in (".txt", ".json", ".jsonl", ".toml", ".npz", ".safetensors"):
        (outside / f"secret{suffix}").write_text("{}")


def _recipes(folder: Path) -> None:
    texts = [(RECIPES / f"{name}.toml").read_text() for name in ("digits", "digits_moe", "digits_balanced")]
    for i, text in enumerate([*texts, *(case.text for case in draw_recipes(6, 7))]):
        (folder / f"{i}.toml").write_text(text)
    (folder / "lines.arguments").write_text(
        "--training.steps=20\n--modules.llm.lr=1e-3\n--optimizer.name=SGD\n--data.seed=1\n--parallelism.llm.ranks=0-1\n"
        "--boundaries.0.at=image\n--modules.llm.config.hidden_size=64\n--checkpoint.exclude_from_loading=a,b"
    )
    with (folder / "lengths.jsonl").open("w") as file:
        file.writelines(f'{{"vision": {64 * i}, "llm": {i + 3}}}\n' for i in range(6))


def _project(folder: Path) -> None:
    """A Hugging Face directory, data for it, and the recipe that names both."""
    from PIL import Image

    model = folder / "model"
    tiny_vlms.build("qwen3_vl").save_pretrained(model)
    _tokenizer(model)
    _split(model)
    qwen = {"patch_size": 2, "temporal_patch_size": 2, "merge_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}
    qwen |= {"size": {"shortest_edge": 32, "longest_edge": 200}, "processor_class": "Qwen3VLProcessor"}
    mean = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    _json(model / "preprocessor_config.json", {**qwen, **mean})
    for name, how in (
        ("short", {"size": {"shortest_edge": 8}, "do_center_crop": False}),
        ("square", {"size": 8, "crop_size": 8}),
    ):
        (folder / name).mkdir()
        _json(folder / name / "preprocessor_config.json", {**how, **mean, "image_processor_type": "CLIPImageProcessor"})
    tiles = {"size": {"height": 8, "width": 8}, "image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]], "do_pad": True}
    (folder / "tiles").mkdir()
    kind = {"image_processor_type": "LlavaOnevisionImageProcessor"}
    _json(folder / "tiles" / "preprocessor_config.json", {**tiles, **mean, **kind})
    (folder / "audio").mkdir()
    whisper = {"feature_size": 4, "hop_length": 16, "chunk_length": 1, "n_fft": 64, "sampling_rate": 1600}
    _json(
        folder / "audio" / "preprocessor_config.json", {**whisper, "feature_extractor_type": "WhisperFeatureExtractor"}
    )
    data = folder / "data"
    data.mkdir()
    draw = np.random.default_rng(0)
    for name, form in (("a.png", "PNG"), ("b.jpg", "JPEG"), ("c.webp", "WEBP"), ("d.gif", "GIF"), ("e.tiff", "TIFF")):
        Image.fromarray(draw.integers(0, 256, (9, 14, 3), dtype=np.uint8)).save(data / name, form)
    with wave.open(str(data / "g.wav"), "wb") as file:
        file.setparams((1, 2, 1600, 0, "NONE", ""))
        file.writeframes(draw.integers(0, 256, 400, dtype=np.uint8).tobytes())
    (data / "talks.jsonl").write_text("\n".join(json.dumps(talk) for talk in talks()))
    _json(data / "list.json", talks()[:2])
    with tarfile.open(data / "shard.tar", "w", format=tarfile.USTAR_FORMAT) as shard:
        for key in "ab":
            turns = talks()[0]["messages"]
            turns[0]["content"][0]["image"] = "png"
            for end, content in (
                ("png", (data / "a.png").read_bytes()),
                ("json", json.dumps({"messages": turns}).encode()),
            ):
                member = tarfile.TarInfo(f"{key}.{end}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    (folder / "recipe.toml").write_text(
        '[model]\nhf_path = "model"\n[data.options]\npath = "data/talks.jsonl"\n[training]\nlocal_batch_size = 2\n'
        '[job]\ndump_folder = "out"\n'
    )
    part = '[[data.mixture]]\nname = "{0}"\nsource = "conversations"\nweight = 0.5\n[data.mixture.options]\n'
    part += 'path = "data/{0}"\ntokenizer = "model"\nimage_processor = "short"\n'
    part += 'placeholders = {{ image = "<|image_pad|>" }}\n'
    whole = (RECIPES / "digits.toml").read_text().replace('source = "digits"', "")
    images = part.format("images.jsonl") + part.format("list.json")
    (data / "images.jsonl").write_text("\n".join(json.dumps(talk) for talk in talks()[:3]))
    (folder / "mixture.toml").write_text(whole.replace("[training]", images + "\n[training]"))


def talks() -> list[dict[str, Any]]:
    """Conversations about the images of the project."""

    def talk(kind: str, name: str) -> dict[str, Any]:
        asked = [{"type": kind, kind: name}, {"type": "text", "text": "what is this"}]
        return {"id": name, "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "a cat"}]}

    small = {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image> what"}, {"from": "gpt", "value": "dog"}],
    }
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
    url = f"data:image/png;base64,{pixel}"
    images = [talk("image", "a.png"), small, talk("image", url)]
    return images + [talk("image", name) for name in ("b.jpg", "c.webp", "d.gif", "e.tiff")]


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<|image_pad|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<audio>"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=special
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def _split(folder: Path) -> None:
    """Its weights as two files with an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"part-{1 + (i >= len(names) // 2)}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    _json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": files})


def _json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


def _run(folder: Path) -> None:
    timeline = simulate_recipe(resolve(load_recipe(RECIPES / "digits_pipeline.toml"))).as_json()
    load = {"max_over_mean": 1.2, "std_over_mean": 0.1, "padding": 0.1}
    load |= {f"drawn_{key}": value for key, value in load.items()}
    lines = [
        {
            "step": i,
            "loss": 2.0 / i,
            "samples_per_s": 10.0,
            "load": {"llm": load, "vision": load},
            "memory_bytes": {"0": 9},
        }
        for i in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    _json(folder / "summary.json", {"steps": 3, "seconds": 1.5})
    _json(folder / "timeline.json", {"step": 2, "predicted": timeline, "measured": timeline})


def _checkpoint(folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    recipe = load_recipe(RECIPES / "digits_single.toml", ["--checkpoint.enable=true"])
    (folder / "recipe.json").write_text(to_json(recipe.model_dump(mode="json", by_alias=True)))
    step = folder / recipe.checkpoint.folder / "step-3"
    state = {f"model.llm.{i}": torch.arange(12.0).reshape(3, 4) + i for i in range(3)}
    dcp.save({**state, "extra.run": "{}", "extra.position": 7}, checkpoint_id=step, no_dist=True)
    metadata = checksums.read_metadata(step)
    parts = [
        checksums.SavedPart(info.relative_path, info.offset, info.length, index.fqn)
        for index, info in metadata.storage_data.items()
    ]
    sums = {}
    for part in parts:
        data = (step / part.file).read_bytes()[part.offset : part.offset + part.length]
        sums[part] = xxhash.xxh3_64(data).hexdigest()
    checksums.write_manifest(step, sums)


def forge(folder: Path, rng: random.Random) -> None:
    """Make checksums fit what was changed, as who means harm would; or not, as a disk would."""
    step = next(folder.rglob("step-3"))
    if rng.random() < 0.3:
        return
    try:
        content = json.loads(read_file(step / checksums.MANIFEST))
        content.pop("checksum", None)
        content["metadata"] = zlib.crc32(read_file(step / checksums.METADATA))
        for part in content["parts"]:
            file, offset, length = part[:3]
            named = checksums.is_plain_name(file)  # no other file is read, as nobody else may
            data = read_file(step / file)[offset : offset + length] if named else b""
            part[4] = xxhash.xxh3_64(data).hexdigest() if isinstance(part[4], str) else zlib.crc32(data)
    except Exception:  # no manifest any more
        return
    own = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (step / checksums.MANIFEST).write_text(json.dumps({"checksum": own, **content}))


def read_source(source: Source) -> None:
    """Read all samples; those that are refused hide none behind them."""
    error = None
    for index in range(min(len(source), 8)):
        for look in (source.meta, source.load):
            try:
                look(index)
            except HetmeshError as found:
                error = found
    if error:
        raise error


def options(folder: Path, rng: random.Random, data: str) -> dict[str, Any]:
    """Of the source of the project's `data`."""
    return {
        "path": str(folder / "data" / data),
        "tokenizer": str(folder / "model"),
        "image_processor": str(folder / rng.choice(("model", "short", "square", "tiles"))),
        "audio_processor": str(folder / "audio"),
        "placeholders": {"image": "<|image_pad|>", "audio": "<audio>"},
        "chat_template": rng.choice((None, TEMPLATE)),
    }


AUDIO = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"


def _talk(folder: Path, rng: random.Random) -> None:
    read_source(make_source("conversations", **options(folder, rng, rng.choice(("talks.jsonl", "list.json")))))


def _shard(folder: Path, rng: random.Random) -> None:
    read_source(make_source("conversations", **options(folder, rng, "shard.tar")))


def _sound(folder: Path, rng: random.Random) -> None:
    question = {"role": "user", "content": [{"type": "audio", "audio": "g.wav"}]}
    sound = {"messages": [question, {"role": "assistant", "content": "a"}]}
    (folder / "data" / "sounds.jsonl").write_text(json.dumps(sound))
    given = options(folder, rng, "sounds.jsonl") | {"chat_template": AUDIO}
    read_source(make_source("conversations", **given))


def _index(folder: Path, rng: random.Random) -> None:
    read_source(make_source("conversations", **index_options(folder)))


def index_options(folder: Path) -> dict[str, Any]:
    """Of the source whose index is changed: of shards, whose offsets it holds."""
    return {
        "path": str(folder / "data" / "shard.tar"),
        "tokenizer": str(folder / "model"),
        "image_processor": str(folder / "short"),
        "placeholders": {"image": "<|image_pad|>"},
    }


def make_index(folder: Path) -> None:
    """The index that `_index` reads, beside the data, in the place where it is read."""
    build_index(make_source("conversations", **index_options(folder)))  # type: ignore[arg-type]


def _mixture(folder: Path, rng: random.Random) -> None:
    read_source(recipe_source(load_recipe(folder / "mixture.toml").data))


def _directory(folder: Path, rng: random.Random) -> None:
    found = Pretrained(folder / "model", "model.hf_path")
    _ = found.config, found.tensors
    resolve(load_recipe(folder / "recipe.toml"))


def _weights(folder: Path, rng: random.Random) -> None:
    found = Pretrained(folder / "model", "model.hf_path")
    _ = found.tensors, found.forms


def _saved(folder: Path, rng: random.Random) -> None:
    forge(folder, rng)
    run = saved_run(folder)
    run.read(run.names)


def _report(folder: Path, rng: random.Random) -> None:
    flags = rng.choice(([], [f"--trace={folder / 'trace.json'}"]))
    _command(["report", str(folder), *flags])


def _command(arguments: list[str]) -> None:
    hetmesh(arguments)


KINDS: Mapping[str, Kind] = {
    "recipe": Kind("recipes", ("[0-9].toml",), lambda f, r: load_recipe(changed(f, "*.toml")), 15, True),
    "overrides": Kind("recipes", ("lines.arguments",), lambda f, r: load_recipe(f / "0.toml", arguments(f)), 8),
    "conversations": Kind("project", ("data/talks.jsonl", "data/list.json"), _talk, 16, True),
    "shards": Kind("project", ("data/shard.tar",), _shard, 6),
    "images": Kind("project", ("data/[a-e].*",), _talk, 12, True, links=True),
    "recordings": Kind("project", ("data/g.wav",), _sound, 6),
    "index": Kind("project", ("data/*.npz",), _index, 8, prepare=make_index),
    "mixture": Kind("project", ("mixture.toml", "data/list.json"), _mixture, 5),
    "processors": Kind("project", ("model/*token*", "model/chat*", "*/preprocessor_config.json"), _talk, 10, True),
    "extractors": Kind("project", ("audio/*.json",), _sound, 4),
    "directory": Kind("project", ("model/*.json", "model/part*"), _directory, 8, True),
    "weights": Kind("project", ("model/*.index.json", "model/part*"), _weights, 8),
    "checkpoint": Kind("checkpoint", ("recipe.json", "*/*/*", "*/*/.metadata", "*/*/checksums.json"), _saved, 14),
    "report": Kind("run", ("*",), _report, 14),
}
"""What is read, by name."""


def changed(folder: Path, pattern: str) -> Path:
    """The file of a pattern that was written last."""
    return max(folder.glob(pattern), key=lambda file: file.lstat().st_mtime_ns)


def arguments(folder: Path) -> list[str]:
    """Lines of a file as the command line would hand them over."""
    file = folder / "lines.arguments"
    text = file.read_bytes().decode("utf-8", errors="surrogateescape") if file.is_file() else ""
    return text.split("\n")
