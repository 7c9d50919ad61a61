"""The self-check in a separate process, and its results, which are kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from hetmesh.data.conversations import SETTINGS_FILES
from hetmesh.data.metadata_index import content_hash, file_states
from hetmesh.errors import HetmeshError, OutputError, SelfCheckError
from hetmesh.files import read_object, to_json, write_json, writing
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.directories import directory_of, up_to_llm
from hetmesh.resolve.resolved import ResolvedRecipe, resolve

TIMEOUT_S = 7200
"""Seconds that comparing the modules with transformers' own forward may take."""

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables by which a launcher tells a worker its rank: the process is no worker."""

_JUDGED = ("attention", "data", "models", "parallel", "verify")
_PACKAGES = ("torch", "transformers", "torchvision", "av")
"""Rooms and packages whose code the result depends on."""


def compare_in_process(recipe: Recipe) -> list[str]:
    """Run `compare` in a new process, whose memory and threads are gone afterwards. Raises SelfCheckError: they differ,
    could not be compared, or the comparison took longer than `TIMEOUT_S`."""
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    command = [sys.executable, "-m", "hetmesh.verify.self_check_process"]
    try:
        done = subprocess.run(
            command, input=pickle.dumps(recipe), env=environment, capture_output=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise SelfCheckError(f"self-check: it took more than {TIMEOUT_S} s") from error
    output, errors = (stream.decode(errors="replace").strip() for stream in (done.stdout, done.stderr))
    if done.returncode:
        last = (errors or output).splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise SelfCheckError(f"self-check: {last[0].removeprefix('error: ')}")
    return output.splitlines()


def compare(resolved: ResolvedRecipe) -> list[str]:
    """Compare modules and first samples with transformers' own in this process, and record the result. Returns what was
    found, a line each. Raises SelfCheckError: they differ, or could not be compared."""
    from hetmesh.verify.processor_check import check_processor
    from hetmesh.verify.self_check import NOT_COMPARED, self_check

    data = check_processor(resolved)
    difference = self_check(resolved.recipe)
    found = f"weights: logits differ from transformers' own by at most {difference:.1e}, {NOT_COMPARED}"
    return [f"{found} ({record(resolved.recipe, difference)})", *data]


def needs_self_check(recipe: Recipe) -> bool:
    """Whether the modules come from one directory of a multimodal model, and were not compared with it yet."""
    if directory_of(up_to_llm(recipe)) is None:
        return False
    of = _compared(recipe)
    return all(read_object(file).get("of") != of for file in _record_files(recipe, of))


def record(recipe: Recipe, difference: float) -> Path:
    """Keep a result. Returns the file. Raises OutputError: it can be kept in no place."""
    of = _compared(recipe)
    for file in _record_files(recipe, of):
        try:
            with writing(file.parent):
                file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"max_difference": difference, "of": of})
            return file
        except OutputError as error:
            problem = error
    raise OutputError(f"the result of the self-check cannot be kept: {problem}") from problem


def _record_files(recipe: Recipe, of: str) -> tuple[Path, Path]:
    """Where the result for `of` is kept: in the user's cache, so that other runs find it; where that cannot be written,
    beside the dump folder."""
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    beside = Path(f"{recipe.job.dump_folder.rstrip('/')}.self_check.json")
    return Path(cache, "hetmesh", "self_check", f"{of[:32]}.json"), beside


def _compared(recipe: Recipe) -> str:
    """A hash of all that the result depends on."""
    recipe = up_to_llm(recipe)
    pretrained = directory_of(recipe)
    data = recipe.data.mixture or (recipe.data,)
    named = [os.path.expanduser(value) for each in data for value in each.options.values() if isinstance(value, str)]
    named += [str(pretrained.path)] if pretrained else []
    places = [Path(folder).resolve() for folder in named if os.path.isdir(folder)]
    files = [pretrained.path / "config.json", *pretrained.files] if pretrained else []
    files += [file for place in places for name in SETTINGS_FILES if (file := place / name).is_file()]
    modules = {name: module.model_dump(mode="json", by_alias=True) for name, module in recipe.modules.items()}
    keys = ("model", "config", "media", "attention_mask", "lora")
    code = [file for room in _JUDGED for file in sorted((Path(__file__).parents[1] / room).rglob("*.py"))]
    made = {
        "folders": [*map(str, places)],
        "files": file_states(files),
        "modules": {name: {key: table[key] for key in keys} for name, table in modules.items()},
        "boundaries": [[b.source, b.destination, b.at] for b in recipe.boundaries],
        "packed": recipe.training.pack_samples,
        "data": [[each.source, each.options] for each in data],
        "paths": [os.path.abspath(os.path.expanduser(str(each.options.get("path", "/")))) for each in data],
        "versions": [[name, found.version] for name in _PACKAGES for found in distributions(name=name)],
        "code": content_hash(code),
    }
    return hashlib.sha256(to_json(made).encode()).hexdigest()


def _main() -> int:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as findings:
        os.dup2(2, 1)  # tokenizers write about unknown options to stdout, from Rust
        try:
            print(*compare(resolve(pickle.load(sys.stdin.buffer))), sep="\n", file=findings)
        except HetmeshError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
