"""Every kind of input of `fuzz_readers`: those of `reader_inputs`, and what else people hand over or leave in folders:
machines, profiles, tables, chat templates, links in directories, folders of earlier runs."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fuzzing import reader_inputs
from fuzzing.reader_inputs import RECIPES, TEMPLATE, Kind, options, read_source, talks
from hetmesh.cli import main as hetmesh
from hetmesh.cost import MACHINES, Coefficients, Profile, layer_kind, load_machine
from hetmesh.cost.fitted import PARTS
from hetmesh.data import answers, chat_template, make_source
from hetmesh.data.digits import read_digit
from hetmesh.data.find_conversations import find_conversations
from hetmesh.data.lengths import read_lengths
from hetmesh.errors import HetmeshError
from hetmesh.export import directory_files as export_files
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.recipe.recipe import Recipe, load_recipe
from hetmesh.records import dump_folder
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.verify import self_check_process

TABLES = ("table.parquet", "table.arrow", "saved")


def make_bases(root: Path) -> None:
    """Those of `reader_inputs`, with more files in them."""
    import datasets

    reader_inputs.make_bases(root)
    chat_template.MAX_TRIAL_SECONDS = 0.5  # instead of 5: some inputs of a hundred take it
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = root / "cache"  # tables are unpacked there
    _plans(root / "recipes")
    _more_data(root / "project")
    (root / "run" / "recipe.json").write_text('{"job": {"dump_folder": "run"}}')
    for name in TABLES[:2]:
        shutil.copy(root / "project" / "data" / name, root / "outside" / name)


def _plans(folder: Path) -> None:
    recipe = load_recipe(RECIPES / "digits_pipeline.toml")
    shutil.copy(RECIPES / "digits_pipeline.toml", folder / "pipeline.recipe")
    shapes = resolve(recipe).shapes.values()
    kinds = {layer_kind(layer) for shape in shapes if shape is not None for layer in shape.layers}
    Profile(dict.fromkeys(kinds, dict.fromkeys(PARTS, Coefficients(1e-4, 1e-6, 1e-9)))).save(folder / "profile.json")
    machines = Path(load_machine.__code__.co_filename).parent / "machines"
    (folder / "machine.toml.base").write_text((machines / f"{MACHINES[-1]}.toml").read_text())


def _more_data(folder: Path) -> None:
    import datasets

    data = folder / "data"
    rows = [{"image": (data / "a.png").read_bytes(), "messages": json.dumps(talks()[0]["messages"])} for _ in range(3)]
    for row in rows:
        row["messages"] = json.dumps(_unnamed(json.loads(row["messages"])))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(data / "table.parquet")
    table.save_to_disk(data / "saved")
    arrow = next((data / "saved").glob("*.arrow"))
    shutil.copy(arrow, data / "table.arrow")
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    (folder / "model" / "additional_chat_templates").mkdir()
    (folder / "model" / "additional_chat_templates" / "tool.jinja").write_text(TEMPLATE)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)


def _unnamed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns whose images are those of their row."""
    for turn in messages:
        if isinstance(turn["content"], list):
            turn["content"] = [{"type": "image"} if p["type"] == "image" else p for p in turn["content"]]
    return messages


def _costs(folder: Path, rng: random.Random) -> None:
    """A machine and a profile of one's own, by whoever reckons with them."""
    recipe = folder / "pipeline.recipe"
    files: dict[str, Any] = {"machine": str(folder / "machine.toml"), "profile": str(folder / "profile.json")}
    given = {name: files[name] for name in rng.choice((("machine",), ("profile",), ("machine", "profile")))}
    if (drawn := rng.random()) < 0.15:
        verb = ["plan", "--ranks=2", "--shown=1"] if drawn < 0.02 else ["simulate"]  # planning takes seconds
        return command(verb, recipe, [f"--{name}={file}" for name, file in given.items()])
    simulate_recipe(resolve(load_recipe(recipe)), **given)
    return None


def _own_machine(folder: Path) -> None:
    (folder / "machine.toml.base").rename(folder / "machine.toml")


def _lengths(folder: Path, rng: random.Random) -> None:
    if rng.random() < 0.2:
        return command(["balance"], folder / "0.toml", [f"--lengths={folder / 'lengths.jsonl'}"])
    read_lengths(folder / "lengths.jsonl", ("vision", "llm"))
    return None


def command(verb: list[str], recipe: Path, flags: list[str]) -> None:
    """A verb, whose errors are HetmeshErrors here; what `main` turns into a status and a message is not caught."""
    if hetmesh([*verb, str(recipe), *flags]):
        raise HetmeshError("refused")


def _table(folder: Path, rng: random.Random) -> None:
    given = options(folder, rng, rng.choice(TABLES)) | {"image_processor": str(folder / "short")}
    given |= {"placeholders": {"image": "<|image_pad|>"}, "chat_template": TEMPLATE}
    read_source(make_source("conversations", **given))


def _template(folder: Path, rng: random.Random) -> None:
    given = options(folder, rng, "talks.jsonl") | {"chat_template": None}
    read_source(make_source("conversations", **given))


def _image(folder: Path, rng: random.Random) -> None:
    """As a digit of the demo, or as what `hetmesh init` looks for."""
    if rng.random() < 0.3:
        return void(find_conversations(str(folder / "data"), key="--data"))
    errors = []
    for file in sorted((folder / "data").glob("[a-e].*")):
        try:
            read_digit(file)
        except HetmeshError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return None


def _copied(folder: Path, rng: random.Random) -> None:
    """What an export takes from a directory beside its weights: nothing that is a link out of it."""
    with tempfile.TemporaryDirectory() as place:
        export_files.copy_files(Pretrained(folder / "model", "model.hf_path"), Path(place))


def _beside(folder: Path, rng: random.Random) -> None:
    """What `generate` and the self-check read of a directory, and beside the folders of runs."""
    answers.configured_end_tokens(folder / "model")
    void(self_check_process.needs_self_check(_recipe(folder)))


def _claimed(folder: Path, rng: random.Random) -> None:
    """A folder in which a run is to begin, or to go on."""
    recipe = load_recipe(RECIPES / "digits_single.toml", [f"--job.dump_folder={folder}"])
    dump_folder.trim_metrics(folder / "metrics.jsonl", 2)
    void(dump_folder._followers(folder), dump_folder._asked_for(folder))
    if (claim := dump_folder._claim(recipe).claim) is not None:
        claim.close()


def _self_check(folder: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / "recipe.toml")  # no folder: it is kept beside that of the run
    self_check_process.record(_recipe(folder), 0.5)


def _recipe(folder: Path) -> Recipe:
    """The project's, wherever one is."""
    places = (f"--model.hf_path={folder / 'model'}", f"--data.options.path={folder / 'data' / 'talks.jsonl'}")
    return load_recipe(folder / "recipe.toml", [*places, f"--job.dump_folder={folder / 'out'}"])


def void(*_: object) -> None:
    """Nothing of values."""


Read = Callable[[Path, random.Random], object]
KINDS: Mapping[str, Kind] = {
    **reader_inputs.KINDS,
    "lengths": Kind("recipes", ("lengths.jsonl",), _lengths, 5),
    "costs": Kind("recipes", ("machine.toml", "profile.json"), _costs, 8, prepare=_own_machine),
    "tables": Kind("project", ("data/table.*", "data/saved/*"), _table, 8),
    "templates": Kind("project", ("model/chat_template.jinja",), _template, 5),
    "found": Kind("project", ("data/[a-e].*", "data/*.jsonl", "data/table.*"), _image, 5),
    "copied": Kind("project", ("model/*", "model/*/*"), _copied, 3, links=True),
    "beside": Kind("project", ("model/*.json*", "out.self_check.json"), _beside, 4, prepare=_self_check),
    "folders": Kind("run", ("*",), _claimed, 5),
}
"""What is read, by name."""
