"""The self-check in a separate process, and its results, which are kept beside the dump folder."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from hetmesh.errors import HetmeshError, OutputError, SelfCheckError
from hetmesh.files import read_object
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.directories import directory_of
from hetmesh.resolve.resolved import ResolvedRecipe, resolve

TIMEOUT_S = 7200
"""Seconds that comparing the modules with transformers' own forward may take."""

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables by which a launcher tells a worker its rank: the process is no worker."""

FORM = (
    *("processor_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files from which the samples of conversations are made."""


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
    record(resolved.recipe, difference)
    return [f"weights: logits differ from transformers' own by at most {difference:.1e}, {NOT_COMPARED}", *data]


def needs_self_check(recipe: Recipe) -> bool:
    """Whether the modules come from one directory of a multimodal model, and were not compared with it yet."""
    return directory_of(recipe) is not None and recorded(recipe) is None


def record_file(recipe: Recipe) -> Path:
    """The file of results."""
    return Path(f"{recipe.job.dump_folder.rstrip('/')}.self_check.json")


def recorded(recipe: Recipe) -> float | None:
    """The largest difference that was found for the recipe's modules and the files that its directory has now; None if
    they were not compared."""
    entry = read_object(record_file(recipe)).get(_key(recipe))
    if not isinstance(entry, dict) or entry.get("of") != _compared(recipe):
        return None
    difference = entry.get("max_difference")
    return difference if isinstance(difference, float) else None


def record(recipe: Recipe, difference: float) -> None:
    """Add a result to the file. Raises OutputError: the file cannot be written."""
    file = record_file(recipe)
    results = read_object(file) | {_key(recipe): {"max_difference": difference, "of": _compared(recipe)}}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: the result of the self-check cannot be kept: {error}") from error


def _key(recipe: Recipe) -> str:
    pretrained = directory_of(recipe)
    return "" if pretrained is None else str(pretrained.path.resolve())


def _compared(recipe: Recipe) -> dict[str, Any]:
    """What the result depends on."""
    import transformers

    pretrained = directory_of(recipe)
    files = [] if pretrained is None else [pretrained.path / "config.json", *pretrained.files]
    if pretrained is not None:  # from which the samples of the data are made
        files += sorted(file for file in pretrained.path.iterdir() if file.name in FORM)
    modules = {name: module.model_dump(mode="json", by_alias=True) for name, module in recipe.modules.items()}
    keys = ("model", "config", "media", "attention_mask", "lora")
    return {
        "files": {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in files},
        "modules": {name: {key: table[key] for key in keys} for name, table in modules.items()},
        "boundaries": [[b.source, b.destination, b.at] for b in recipe.boundaries],
        "packed": recipe.training.pack_samples,
        "data": [[data.source, data.options] for data in recipe.data.mixture or (recipe.data,)],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


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
