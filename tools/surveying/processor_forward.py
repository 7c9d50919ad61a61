"""Does a directory's own processor go together with its own model? `model(**processor(batch))`, without hetmesh.

PYTHONPATH=tests/support/torchvision_shim:tools python tools/surveying/processor_forward.py llava qwen3_vl
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))
from surveying.processor_families import FAMILIES, Family
from surveying.tiny_processor import kinds, placeholder, thinker, tiny_directory

SIZES = ((64, 96), (150, 75), (300, 200))
"""Heights and widths of the images, in pixels."""
SECONDS = (0.5, 1.3, 0.9)
CLIPS = ((8, 56, 112), (4, 84, 84), (8, 56, 112))
"""Frames, heights and widths of the videos."""
COUNTS = ((2, 1, 0), (2, 1), (1, 1, 1), (1,))
"""Items of each sample; the first that the processor takes."""


def check(model_type: str, class_name: str) -> dict[str, Any]:
    """A row: `built`, `forward` (of every kind), and by kind its keys, tokens and rows, or the reason why not."""
    import transformers
    from transformers import AutoProcessor

    row: dict[str, Any] = {"model_type": model_type, "class": class_name, "built": False, "forward": False}
    began = time.monotonic()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            tiny_directory(model_type, class_name, Path(folder))
            model = getattr(transformers, class_name).from_pretrained(folder).eval()
            processor = AutoProcessor.from_pretrained(folder)
            row |= {"built": True, "processor": type(processor).__name__, "kinds": {}}
            row |= {"template": bool(processor.chat_template), "built_in": round(time.monotonic() - began, 1)}
        except Exception as error:
            _shown(error)
            return row | {"reason": _said(error)}
        for kind in kinds(processor):
            if getattr(thinker(model).config, f"{kind}_config", True) is None:
                continue  # a tower that only some of the family have
            try:
                row["kinds"][kind] = _of_kind(model_type, model, processor, kind)
            except Exception as error:
                _shown(error)
                row["kinds"][kind] = {"forward": False, "reason": _said(error)}
    row["forward"] = bool(row["kinds"]) and all(each["forward"] for each in row["kinds"].values())
    if not row["kinds"]:
        row["reason"] = f"{row['processor']} takes none of images, videos and audio"
    reasons = [f"{kind}: {each['reason']}" for kind, each in row["kinds"].items() if "reason" in each]
    return row | {"seconds": round(time.monotonic() - began, 1)} | ({"reason": "; ".join(reasons)} if reasons else {})


def batch_of(
    model_type: str, processor: Any, kind: str, counts: Sequence[int], nested: bool, alike: bool = False
) -> dict[str, Any]:
    """Arguments of the processor: as many samples as `counts`, each with so many items of `kind`.

    Args:
        nested: Images as a list for each sample.
        alike: Items of one size.
    """
    random = np.random.default_rng(5)
    items: list[list[Any]] = []
    number = 0
    for count in counts:
        items.append([_item(processor, kind, 0 if alike else number + i, random) for i in range(count)])
        number += count
    flat = [item for each in items for item in each]
    said = placeholder(model_type, processor, kind)
    texts = [f"Sample {i}: {said * count} what is it?" for i, count in enumerate(counts)]
    family = FAMILIES.get(model_type, Family())
    arguments: dict[str, Any] = {"text": texts, "return_tensors": "pt", "padding": True, **family.call}
    if kind == "video":
        arguments["videos"] = [frames for frames, _ in flat]
        arguments["video_metadata"] = [metadata for _, metadata in flat]
    else:
        arguments["images" if kind == "image" else "audio"] = items if nested else flat
    if kind == "audio":
        arguments["sampling_rate"] = _extractor(processor).sampling_rate
    return arguments


def rows_of(features: Any) -> int:
    """How many rows `get_image_features` and the like give, whatever they hand them over in."""
    if isinstance(features, Mapping) or hasattr(features, "pooler_output"):
        pooled = getattr(features, "pooler_output", None)
        features = pooled if pooled is not None else features.last_hidden_state
    if isinstance(features, tuple | list):
        return sum(rows_of(each) for each in features)
    return features.numel() // features.shape[-1]


def _of_kind(model_type: str, model: Any, processor: Any, kind: str) -> dict[str, Any]:
    batch, how = _processed(model_type, processor, kind)
    if processor.chat_template and not _rendered(processor, kind, placeholder(model_type, processor, kind)):
        return how | {"forward": False, "reason": "its chat template leaves the item out"}
    part = thinker(model)
    with torch.no_grad():
        given = {
            key: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in batch.items()
        }
        logits = part(**given).logits
    result: dict[str, Any] = {"keys": sorted(batch.keys() - {"input_ids", "attention_mask"}), **how}
    if not torch.isfinite(logits).all():
        return result | {"forward": False, "reason": "logits are not finite"}
    family = FAMILIES.get(model_type, Family())
    method, ids = _method(part, kind), _token_ids(part.config, kind)
    if kind == "video" and not torch.isin(batch["input_ids"], torch.tensor(ids)).any():
        ids = _token_ids(part.config, "image")  # of some families a video's rows are images'
    if kind == "video" and "pixel_values" in given:
        method = _method(part, "image")
    result["tokens"] = int(torch.isin(batch["input_ids"], torch.tensor(ids)).sum())
    if method is None or kind in family.rows_by_forward:
        reason = {} if result["tokens"] else {"reason": "no placeholders among its tokens"}
        return result | {"forward": result["tokens"] > 0, "method": False} | reason
    names = _named(method) & given.keys()
    with torch.no_grad():
        result["rows"] = rows_of(method(**{key: given[key] for key in names}))
    result |= {"method_keys": sorted(names), "forward": result["rows"] == result["tokens"] > 0}
    if not result["forward"]:
        result["reason"] = f"{result['tokens']} placeholders for {result['rows']} rows"
    return result


def _rendered(processor: Any, kind: str, said: str) -> bool:
    """Whether the chat template writes what stands for an item, and the turns in their order."""
    parts = [{"type": kind}, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]
    text = processor.apply_chat_template(turns, tokenize=False)
    return -1 < text.find(said) < text.find("What is it?") < text.find("A cat.")


def _processed(model_type: str, processor: Any, kind: str) -> tuple[Any, dict[str, Any]]:
    """The batch, and how the processor wanted it."""
    first: Exception | None = None
    for counts in COUNTS:
        for alike in (False, True):
            for nested in (True, False) if kind == "image" else (False,):
                try:
                    batch = processor(**batch_of(model_type, processor, kind, counts, nested, alike))
                    call = dict(FAMILIES.get(model_type, Family()).call)
                    return batch, {"counts": list(counts), "nested": nested, "alike": alike, "call": call}
                except Exception as error:
                    first = first or error
    assert first is not None
    raise first


def _item(processor: Any, kind: str, number: int, random: np.random.Generator) -> Any:
    from PIL import Image
    from transformers.video_utils import VideoMetadata

    if kind == "image":
        height, width = SIZES[number % len(SIZES)]
        return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
    if kind == "audio":
        length = int(SECONDS[number % len(SECONDS)] * _extractor(processor).sampling_rate)
        return random.normal(size=length).astype(np.float32)
    frames, height, width = CLIPS[number % len(CLIPS)]
    metadata = VideoMetadata(
        total_num_frames=frames,
        fps=2.0,
        width=width,
        height=height,
        duration=frames / 2,
        frames_indices=[*range(frames)],
    )
    return random.integers(0, 256, (frames, height, width, 3), dtype=np.uint8), metadata


def _method(part: Any, kind: str) -> Any:
    """Its `get_image_features` or the like, of the class or the model in it: the one whose arguments have names."""
    found = [getattr(each, f"get_{kind}_features", None) for each in (part, getattr(part, "model", None))]
    return max((method for method in found if method is not None), key=lambda method: len(_named(method)), default=None)


def _named(method: Any) -> set[str]:
    parameters = inspect.signature(inspect.unwrap(method)).parameters.values()
    return {each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}


def _extractor(processor: Any) -> Any:
    return getattr(processor, "feature_extractor", None) or processor.audio_processor


def _token_ids(config: Any, kind: str) -> list[int]:
    keys = (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_patch_id")
    parts = (config, getattr(config, "vision_config", None), getattr(config, "audio_config", None))
    return [n for part in parts for key in keys if isinstance(n := getattr(part, key, None), int)]


def _shown(error: BaseException) -> None:
    if os.environ.get("SHOW_TRACEBACK"):
        traceback.print_exception(error)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def main(argv: Sequence[str] | None = None, each: Callable[[dict[str, Any]], None] = lambda row: None) -> int:
    """Print a row for every model type; returns the exit status."""
    import transformers

    from surveying.classes import audio_text_classes, image_text_classes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE", help="some alone")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a JSON object of the rows, kept up to date")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    classes = {**image_text_classes(), **audio_text_classes()}
    rows: dict[str, Any] = {}
    if args.output and args.output.exists():
        rows = json.loads(args.output.read_text(encoding="utf-8"))
    for name in args.names or classes:
        rows[name] = row = check(name, classes[name])
        made = {kind: {k: v for k, v in what.items() if k != "reason"} for kind, what in row.get("kinds", {}).items()}
        print(name, "forward" if row["forward"] else "-", row.get("seconds"), made, row.get("reason", ""), flush=True)
        if args.output:
            args.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
