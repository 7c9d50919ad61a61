"""Whether the first samples of a recipe's conversations are what transformers' own processor makes of them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetmesh.data.conversations import ConversationsSource
from hetmesh.data.expand import Expander, ItemRows, expand_tokens
from hetmesh.data.mixture import MixtureSource
from hetmesh.errors import RecipeError, SampleError, SelfCheckError
from hetmesh.formatting import counted
from hetmesh.models import placeholder_rows
from hetmesh.models.split.encoder_half import HfEncoderAdapter
from hetmesh.recipe.hf_path import expand_hf_path
from hetmesh.resolve.directories import directory_of
from hetmesh.resolve.resolved import ResolvedRecipe

N_SAMPLES = 4
"""Samples of each set of conversations that are compared."""

FORM = ("tokenizer", "chat_template", "replacements", "special_tokens", "placeholders")
"""Options that make a prompt: where one is not the directory's, the recipe has a custom form."""

ONE_TILE = ("crop_to_patches", "do_image_splitting", "do_pan_and_scan")
"""Keys of image processors that `image_tiles = false` turns off."""


@dataclass(frozen=True)
class _Processors:
    both: Any  # of images and text; None where it is not compared
    images: Any
    call: dict[str, Any]  # what is asked of images
    patches: Any  # an image's tensor -> its patches, of models that take these


def check_processor(resolved: ResolvedRecipe) -> list[str]:
    """Compare tokens one by one, and pixels within one grey level. Returns a line for each set of conversations: what
    was compared and what was not. Raises SelfCheckError: they differ; names the sample, the key and the first token or
    pixel."""
    recipe, source, adapters = resolved.recipe, resolved.source, resolved.adapters
    pretrained = directory_of(recipe)
    parts = list(source.parts.values()) if isinstance(source, MixtureSource) else [source]
    tables = zip([table.options for table in recipe.data.mixture] or [recipe.data.options], parts, strict=True)
    conversations = [(options, part) for options, part in tables if isinstance(part, ConversationsSource)]
    if pretrained is None or not conversations:
        return []
    both, images, failed = _loaded(pretrained.path)
    towers = [a for a in adapters.values() if isinstance(a, HfEncoderAdapter) and a.media == "image"]
    lines, rows = [], placeholder_rows(resolved.graph, adapters)
    for options, part in conversations:
        why = failed or _own_form(options, pretrained.path)
        if not why and both.chat_template is None:
            why = f"{type(both).__name__} has no chat template"
        call = {**getattr(both, "images_kwargs", {}), "return_tensors": "pt"}
        keys = () if images is None else images.valid_kwargs.__annotations__
        if options.get("image_tiles") is False:
            call |= dict.fromkeys(set(ONE_TILE) & set(keys), False)
        own = options.get("pad_to_square") or (options.get("image_tiles") is False and not set(ONE_TILE) & set(keys))
        processors = _Processors(
            None if why else both, None if own else images, call, towers[0].call if towers else None
        )
        first = min(N_SAMPLES, len(part))
        done = sum(_is_alike(part, index, rows, processors) for index in range(first))
        what = (
            [*["tokens"] * (processors.both is not None), *["pixels"] * (processors.images is not None)] if done else []
        )
        without = f"; prompts were not: {why}" if why else ""
        of = f"of the first {counted(first, 'sample')}{'' if done in (0, first) else f', of {done} of them,'}"
        compared = f"{' and '.join(what)} {of} equal those" if what else f"nothing {of} was compared with those"
        lines.append(f"data: {compared} of transformers' own processor{without}")
    return lines


def _loaded(path: Path) -> tuple[Any, Any, str]:
    """The processors of a directory, of images and text and of images alone, and why the first does not load."""
    from transformers import AutoImageProcessor, AutoProcessor, ProcessorMixin

    both, images, why = None, None, ""
    try:
        both = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if not isinstance(both, ProcessorMixin):
            both, why = None, "transformers has no processor of images and text for it"
    except Exception as error:  # whatever it lacks here
        why = f"transformers' own does not load here ({' '.join(str(error).split())[:160]})"
    try:  # Pillow's, which rounds as hetmesh does
        images = AutoImageProcessor.from_pretrained(path, local_files_only=True, backend="pil")
        if both is not None:
            both.image_processor = images
    except Exception:  # there is none
        images = getattr(both, "image_processor", None)
    return both, images, why


def _own_form(options: Mapping[str, Any], path: Path) -> str:
    """Why the prompts of a recipe are its own; empty where they are the directory's."""
    raw = {"model": {"hf_path": str(path)}, "data": {"options": {"path": ""}}}
    try:
        filled = expand_hf_path(raw)["data"]["options"]
    except RecipeError:  # a form that hetmesh does not know
        return "the form of a conversation is the recipe's own"
    custom = [f"data.options.{key}" for key in FORM if options.get(key) != filled.get(key)]
    return f"{', '.join(custom)} is the recipe's own" if custom else ""


def _is_alike(part: ConversationsSource, index: int, rows: ItemRows, processors: _Processors) -> bool:
    """Compare one sample; False if nothing of it is compared: it cannot be read, or has other media than images."""
    from PIL import Image, ImageOps

    try:
        meta, sample = part.meta(index), part.load(index)
        turns, media = part.turns(index)
    except SampleError:  # which the run itself reports
        return False
    if any(kind != "image" for kind, _ in media):
        return False
    pictures = [ImageOps.exif_transpose(Image.open(io.BytesIO(blob.read()))) for _, blob in media]
    if pictures and processors.images is not None:
        with _asking(meta.id, processors.images):
            theirs = processors.images(images=[pictures], **processors.call)["pixel_values"]
        items, shape = sample.media["image"], theirs.shape[-3:]
        ours: Tensor | Sequence[Tensor] = items
        if all(item.shape[-3:] == shape for item in items):
            ours, theirs = torch.cat([item.reshape(-1, *shape) for item in items]), theirs.reshape(-1, *shape)
        elif processors.patches is not None:
            ours = processors.patches.collate(items, [item.size for item in meta.media])["media"]
        _check_pixels(meta.id, ours, theirs, processors.images)
    if processors.both is not None:
        tokens = expand_tokens(sample, meta, Expander(rows)(meta).meta, part.placeholders).tokens
        with _asking(meta.id, processors.both):
            text = processors.both.apply_chat_template(turns, tokenize=False)
            bos = processors.both.tokenizer.bos_token
            more = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
            made = processors.both(text=[text], images=[pictures] if pictures else None, **processors.call, **more)
        _check_tokens(meta.id, tokens.tolist(), made["input_ids"][0].tolist(), processors.both)
    return True


@contextmanager
def _asking(sample: str, processor: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of transformers' own
        name = type(processor).__name__
        raise SelfCheckError(f"sample {sample!r}: transformers' {name} cannot take it: {error}") from error


def _check_pixels(sample: str, ours: Tensor | Sequence[Tensor], theirs: Tensor, images: Any) -> None:
    level = (images.rescale_factor if images.do_rescale else 1) / (min(images.image_std) if images.do_normalize else 1)
    what = f"sample {sample!r}: pixel_values: "
    if not isinstance(ours, Tensor) or ours.shape != theirs.shape:
        shapes = ours.shape if isinstance(ours, Tensor) else [pixels.shape for pixels in ours]
        raise SelfCheckError(f"{what}{shapes}, and {theirs.shape} by transformers' {type(images).__name__}")
    if len(far := ((ours - theirs).abs() > 1.01 * level).nonzero()):
        at = tuple(far[0].tolist())
        raise SelfCheckError(
            f"{what}{len(far)} of {ours.numel()} differ by more than a grey level ({level:.4f}), first {list(at)}: "
            f"{ours[at]:.4f}, and {theirs[at]:.4f} by transformers' {type(images).__name__}"
        )


def _check_tokens(sample: str, ours: list[int], theirs: list[int], both: Any) -> None:
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    said = [repr(both.tokenizer.decode(ids[at : at + 1])) if at < len(ids) else "the end" for ids in (ours, theirs)]
    raise SelfCheckError(
        f"sample {sample!r}: input_ids: token {at} of {len(ours)} is {said[0]}, and {said[1]} of {len(theirs)} by "
        f"transformers' {type(both).__name__}"
    )
