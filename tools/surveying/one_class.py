"""One class of transformers: is it split, and do its parts compute and learn what the whole computes and learns?"""

from __future__ import annotations

import contextlib
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hetmesh.errors import HetmeshError, SelfCheckError
from surveying.tiny_config import make_tiny

FP64 = 1e-9
"""Largest relative error of losses, gradients and parameters of two steps."""


NAMES = re.compile("tensors are none of|save_original_format")
"""Refusals of tensors by their names: saved in transformers' own form the model may be taken."""


Judge = Callable[[str], dict[str, Any]]
"""(text of a recipe of a tiny model's directory) -> what the row says of its training; may raise HetmeshError."""


def survey(model_type: str, class_name: str, judge: Judge | None = None) -> dict[str, Any]:
    """What becomes of a class: a row of the survey's table.

    `result` is `not_buildable`, `refused` (by what `hetmesh check` finds without weights), `refused_by_self_check`
    (what the first use of a directory runs), `passed`, `failed` (an error that is none of hetmesh's), or
    `silently_wrong`: the self-check passes, and losses, gradients or parameters of two steps of training differ from
    transformers' own. `split` is whether it comes apart into its parts, which a model does whose items cannot be handed
    over.

    Args:
        judge: in place of the self-check and two steps in one process.
    """

    def surveyed(small_images: bool, original_form: bool) -> dict[str, Any]:
        return _surveyed(model_type, class_name, small_images, original_form, judge or _judged)

    row = surveyed(True, True)
    if row["result"] == "refused" and NAMES.search(row["reason"]):
        row = surveyed(True, False)
    if row["result"] == "not_buildable" or (row["result"] == "refused" and row["split"] and "items" not in row):
        other = surveyed(False, "saved_with" not in row)
        row = other if other["result"] not in ("not_buildable", "refused") else row
    return row


def _surveyed(
    model_type: str, class_name: str, small_images: bool, original_form: bool, judge: Judge
) -> dict[str, Any]:
    row: dict[str, Any] = {"model_type": model_type, "class": class_name, "split": False}
    if not original_form:
        row["saved_with"] = "save_original_format=False"
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            path = _saved(model_type, class_name, small_images, original_form, Path(folder) / "model")
        except Exception as error:  # whatever transformers makes of a config that it did not write
            return row | {"result": "not_buildable", "reason": _said(error)}
        row |= _tried(path, row, judge)
        return row | ({"reason": row["reason"].replace(f"{path}", "DIR")[:500]} if "reason" in row else {})


def _saved(model_type: str, class_name: str, small_images: bool, original_form: bool, path: Path) -> Path:
    """The directory of a tiny model with random weights, biases and norms included."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = getattr(transformers, class_name)
    for axes in (False, True):
        torch.manual_seed(7)
        model = model_class(make_tiny(CONFIG_MAPPING[model_type](), small_images, axes)).eval()
        try:
            with contextlib.suppress(TypeError, ValueError):  # some want more than text
                model(input_ids=torch.arange(2, 9)[None])
            break
        except RuntimeError:  # keys of a default config do not suit each other
            if axes:
                raise
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path, save_original_format=original_form)
    return path


def _tried(path: Path, row: dict[str, Any], judge: Judge) -> dict[str, Any]:
    from hetmesh.models.split.item_calls import apart
    from hetmesh.models.split.whole_model import whole_model
    from hetmesh.models.weights.pretrained import Pretrained
    from hetmesh.recipe.recipe import parse_recipe
    from hetmesh.resolve.resolved import resolve
    from hetmesh.verify.self_check import _encoders

    try:
        recipe = parse_recipe(_recipe(path, {}))
        whole = whole_model(Pretrained(path, "model.hf_path"))
        row |= {
            "split": True,
            "parts": sorted(set(whole.owners.values())),
            "mask": whole.family.mask,
            "positions": whole.positions,
        }
        _ = whole.checkpoint_names
        calls = {at: each.call for at, each in _encoders(recipe, whole).items()}
        row["items"] = {at: type(call).__name__ for at, call in calls.items()}
        items = {at: apart(call, call.blank) for at, call in calls.items()}
        text = _recipe(path, items, whole.around)
        adapters = resolve(parse_recipe(text)).adapters
        row["abilities"] = {
            key: adapters["llm"].abilities.because(key) if not getattr(adapters["llm"].abilities, key) else True
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


def _judged(text: str) -> dict[str, Any]:
    from hetmesh.recipe.recipe import parse_recipe
    from hetmesh.verify.self_check import self_check

    recipe = parse_recipe(text)
    return {"max_difference": self_check(recipe), **_trained(recipe)}


def _trained(recipe: Any) -> dict[str, Any]:
    """Two steps in fp64 beside transformers' own model, whose forward and backward share nothing with hetmesh's."""
    from hetmesh.testing import parity
    from support.whole_reference import whole_reference

    try:
        error = parity.compare(whole_reference(recipe, 2), [parity.reference(recipe, 2)], FP64)
    except parity.ParityError as wrong:
        return {"result": "silently_wrong", "reason": _said(wrong)}
    except Exception as error:
        return {"result": "failed", "reason": _said(error)}
    return {"result": "passed", "max_training_error": error}


def _recipe(path: Path, items: Mapping[str, Any], around: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Random samples of `items`, each a shape and a size, with tokens `around` them."""
    given = items or {"image": ((3, 8, 8), ())}
    kinds = ", ".join(f"{at} = {list(shape)}" for at, (shape, _) in given.items())
    choices = ", ".join(f"{at} = [[{list(shape)}, {list(size)}]]" for at, (shape, size) in given.items())
    beside = ", ".join(f"{at} = {list(tokens)}" for at, tokens in around.items())
    options = f"kinds = {{ {kinds} }}, choices = {{ {choices} }}, around = {{ {beside} }}"
    return f"""
[model]
hf_path = '{path}'
[data]
source = "hetmesh.testing.sources:RandomMedia"
options = {{ {options}, apart = true, max_text = 12, max_items = 2 }}
[training]
local_batch_size = 3
dtype = "float64"
"""


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:700]
