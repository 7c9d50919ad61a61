"""One class of transformers, as the directory that a user has: do its parts compute and learn what the whole does?"""

from __future__ import annotations

import json
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hetmesh.errors import HetmeshError, SampleError, SelfCheckError
from surveying.samples import write_samples

STEPS = 3
RATES = (0.1, 0.001)
"""Learning rates: the second where steps at the first amplify rounding, to differences between `FP64` and `CLOSE`."""

CLOSE = 1e-7

FP64 = 1e-10
"""Largest relative error of losses, gradients and parameters of these steps."""

NAMES = re.compile("tensors are none of|save_original_format")
"""Refusals of tensors by their names: saved in transformers' own form the model may be taken."""

TOWERS = {"image": "vision", "audio": "audio"}
FRAMES = 6
"""Of each clip, where a family takes no clips of unlike lengths together."""

Judge = Callable[[str], dict[str, Any]]
"""(text of a recipe of a tiny model's directory) -> what the row says of its training; may raise HetmeshError."""


def survey(model_type: str, class_name: str, judge: Judge | None = None) -> dict[str, Any]:
    """What becomes of a class: a row of the survey's table.

    `result` is `not_buildable`, `refused` (by what `hetmesh check` finds without weights), `refused_by_self_check`
    (what the first use of a directory runs), `passed`, `failed` (an error that is none of hetmesh's), or
    `silently_wrong`: the self-check passes, and losses, gradients or parameters of three steps of training, in one
    process or with every module on ranks of its own, differ from transformers' own. `split` is whether it comes apart
    into its parts.

    Args:
        judge: in place of the self-check and the steps.
    """
    row = _surveyed(model_type, class_name, True, judge or _judged)
    if row["result"] == "refused" and NAMES.search(row["reason"]):
        row = _surveyed(model_type, class_name, False, judge or _judged)
    return row


def _surveyed(model_type: str, class_name: str, original_form: bool, judge: Judge) -> dict[str, Any]:
    from surveying.tiny_processor import tiny_directory

    row: dict[str, Any] = {"model_type": model_type, "class": class_name, "split": False}
    if not original_form:
        row["saved_with"] = "save_original_format=False"
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        path = Path(folder) / "model"
        try:
            tiny_directory(model_type, class_name, path, original_form)
        except Exception as error:  # whatever transformers makes of a config that it did not write
            return row | {"result": "not_buildable", "reason": _said(error)}
        row |= _tried(path, row, judge)
        return row | ({"reason": row["reason"].replace(f"{path}", "DIR")[:500]} if "reason" in row else {})


def _tried(path: Path, row: dict[str, Any], judge: Judge) -> dict[str, Any]:
    """Where processor and tower read clips, with these, too; without them as far as those do not pass."""
    from hetmesh.models.split.whole_model import whole_model
    from hetmesh.models.weights.pretrained import Pretrained
    from hetmesh.recipe.recipe import parse_recipe

    try:
        towers = set(parse_recipe(_recipe(path)).modules)
        whole = whole_model(Pretrained(path, "model.hf_path"))
        parts = sorted(set(whole.owners.values()))
        row |= {"split": True, "parts": parts, "mask": whole.family.mask, "positions": whole.positions}
        _ = whole.checkpoint_names
    except HetmeshError as error:
        return row | {"result": "refused", "reason": _said(error)}
    kinds = sorted(media for media, part in TOWERS.items() if part in towers)
    if _reads_clips(whole, path):
        for frames in (None, FRAMES):
            found = _with_samples(path, [*kinds, "video"], frames, judge)
            if found["result"] in ("passed", "silently_wrong"):
                return row | found | {"video": found["result"] == "passed"}
            row["without_video"] = found["reason"].replace(f"{path}", "DIR")[:500]
            if "processor_options fix them (num_frames" not in found["reason"]:
                break  # it is not that clips have unlike numbers of frames
    return row | _with_samples(path, kinds, None, judge)


def _reads_clips(whole: Any, path: Path) -> bool:
    from hetmesh.data.preparation import Preparation
    from hetmesh.models.split.whole_model import features_of

    if "vision" not in whole.towers or features_of(whole.model, "video") is None:
        return False
    try:
        return "video" in Preparation(path, {}, None, "[data.options]").placeholders
    except HetmeshError:
        return False


def _with_samples(path: Path, kinds: list[str], frames: int | None, judge: Judge) -> dict[str, Any]:
    from hetmesh.recipe.recipe import parse_recipe
    from hetmesh.resolve.resolved import resolve

    text = _recipe(path) + ('[modules.vision]\nmedia = "image+video"\n' if "video" in kinds else "")
    row: dict[str, Any] = {}
    try:
        row |= _samples_left(path, write_samples(path.parent / "samples.json", kinds, frames))
        if without := set(kinds) - {kind for name in row["samples"] for kind in name.split("+")}:
            reason = f"its processor takes no {sorted(without)}: {row.get('dropped')}"
            return row | {"result": "refused", "reason": reason}
        resolved = resolve(parse_recipe(text))
        row["abilities"] = {
            key: abilities.because(key) if not getattr(abilities, key) else True
            for abilities in (resolved.adapters["llm"].abilities,)
            for key in ("activation", "token_sharded", "use_packed")
        }
    except HetmeshError as error:
        return row | {"result": "refused", "reason": _said(error)}
    try:
        return row | judge(text)
    except SelfCheckError as error:
        return row | {"result": "refused_by_self_check", "reason": _said(error)}
    except HetmeshError as error:
        return row | {"result": "refused", "reason": _said(error)}


def _samples_left(path: Path, names: list[str]) -> dict[str, Any]:
    """Leave those samples that the processor itself takes: some take one item a text, or no text alone."""
    from hetmesh.data.conversations import ConversationsSource
    from hetmesh.verify.processor_check import by_transformers

    file, kept, dropped = path.parent / "samples.json", [], {}
    source = ConversationsSource(str(file), processor=str(path))
    assert source.preparation is not None
    for i, name in enumerate(names):
        try:
            by_transformers(source, source.preparation, i)
        except (SelfCheckError, SampleError) as error:
            dropped[name] = _said(error)[:200]
        else:
            kept.append(i)
    records = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps([records[i] for i in kept]), encoding="utf-8")
    return {"samples": [names[i] for i in kept]} | ({"dropped": dropped} if dropped else {})


def _judged(text: str) -> dict[str, Any]:
    from hetmesh.recipe.recipe import parse_recipe
    from hetmesh.resolve.resolved import resolve
    from hetmesh.verify.processor_check import check_processor
    from hetmesh.verify.self_check import self_check

    recipe = parse_recipe(text)
    (line,) = check_processor(resolve(recipe))
    first, of = re.findall(r"\d+", line)[:2]
    if first != of:
        return {"result": "refused", "reason": line}
    found: dict[str, Any] = {"processor": line, "max_difference": self_check(recipe)}
    try:
        return found | _trained(text)
    except Exception as error:
        if os.environ.get("SHOW_TRACEBACK"):
            traceback.print_exception(error)
        return found | {"result": "failed", "reason": _said(error)}


def _trained(text: str) -> dict[str, Any]:
    """Steps in fp64 beside transformers' own model on what its own processor makes of the conversations."""
    from surveying.on_ranks import in_a_fork

    for rate in RATES:
        found = in_a_fork(partial(_steps, text, rate))
        if not (found.pop("close") and found["result"] == "silently_wrong"):
            break
    return found


def _steps(text: str, rate: float) -> dict[str, Any]:
    from hetmesh.recipe.recipe import parse_recipe
    from hetmesh.testing import parity
    from support.whole_reference import whole_reference
    from surveying.on_ranks import run_on_ranks

    recipe = parse_recipe(text)
    ranks = run_on_ranks(parse_recipe(text + _apart(recipe)), STEPS, len(recipe.modules), rate)
    truth = whole_reference(recipe, STEPS, rate, processed=True)
    runs = [parity.reference(recipe, STEPS, rate)], ranks
    found = {"learning_rate": rate, "close": all(_is_close(truth, outcomes) for outcomes in runs)}
    try:
        errors = [parity.compare(truth, outcomes, FP64) for outcomes in runs]
    except parity.ParityError as wrong:
        return {"result": "silently_wrong", "reason": _said(wrong), **found}
    return {"result": "passed", "max_training_error": errors[0], "max_error_on_ranks": errors[1], **found}


def _is_close(truth: Any, outcomes: list[Any]) -> bool:
    from hetmesh.testing import parity

    try:
        return parity.compare(truth, outcomes, CLOSE) < CLOSE
    except parity.ParityError:
        return False


def _apart(recipe: Any) -> str:
    """Every module on a rank of its own, the samples in microbatches of one."""
    tables = "".join(f"[parallelism.{name}]\nranks = [{i}]\n" for i, name in enumerate(recipe.modules))
    return f"[parallelism]\npipeline_parallel_microbatch_size = 1\n{tables}"


def _recipe(path: Path) -> str:
    return f"""
[model]
hf_path = '{path}'
[data.options]
path = '{path.parent}/samples.json'
[training]
local_batch_size = 3
dtype = "float64"
"""


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:700]
