"""Whether the first samples of a recipe's conversations are what `apply_chat_template` of the directory's processor
makes of their messages in one call, tokens, rows and pixels; nothing of hetmesh is on that side but opened files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hetmesh.data.conversations import ConversationsSource
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.preparation import Preparation
from hetmesh.data.source import Sample
from hetmesh.data.stores.store import Blob
from hetmesh.errors import SampleError, SelfCheckError
from hetmesh.formatting import counted
from hetmesh.models.config_keys import hf
from hetmesh.models.split.made import as_tensor
from hetmesh.models.split.processor import Clip
from hetmesh.resolve.directories import directory_of, up_to_llm
from hetmesh.resolve.resolved import ResolvedRecipe

N_SAMPLES = 4
"""Samples of each set of conversations that are compared."""


def check_processor(resolved: ResolvedRecipe) -> list[str]:
    """Compare tokens and tensors one by one. Returns a line for each set of conversations: what was compared and what
    was not. Raises SelfCheckError: they differ; names the sample, the key and the first token or place."""
    source = resolved.source
    parts = list(source.parts.values()) if isinstance(source, MixtureSource) else [source]
    lines = []
    for part in (part for part in parts if isinstance(part, ConversationsSource)):
        if directory_of(up_to_llm(resolved.recipe)) is None:
            continue
        if part.preparation is None:
            lines.append("data: nothing was compared with transformers' own processor: data.options name a tokenizer")
            continue
        first = min(N_SAMPLES, len(part))
        reasons = [*filter(None, (_not_compared(part, part.preparation, index) for index in range(first)))]
        what = f"tokens and tensors of {first - len(reasons)} of the first {counted(first, 'sample')} equal those"
        why = f"; not compared: {reasons[0]}" if reasons else ""
        lines.append(f"data: {what} of transformers' own processor{why}")
    return lines


def _not_compared(part: ConversationsSource, preparation: Preparation, index: int) -> str:
    """Compare one sample, or say why not: it cannot be read, which the run itself reports, or there is no such call."""
    try:
        sample = part.load(index)
        made = by_transformers(part, preparation, index)
    except SelfCheckError:  # a ValueError too
        raise
    except (SampleError, OSError, ValueError) as error:
        return str(error)
    if made is None:
        return f"sample {sample.id!r}: the chat template takes no media"
    own = preparation.processor.own
    _check_tokens(sample.id, sample.tokens.tolist(), made["input_ids"][0].tolist(), own)
    _check_tensors(sample, made, own)
    return ""


def by_transformers(
    part: ConversationsSource, preparation: Preparation, index: int, **more: Any
) -> Mapping[str, Any] | None:
    """What the directory's processor makes of a conversation, called as transformers' users call it, with `more`
    options; None where the template takes no media, so that there is no such call. Raises SelfCheckError: it does not
    take it; SampleError, OSError, ValueError: media cannot be read."""
    turns, tools, media = part.turns(index)
    opened = [_opened(preparation, kind, blob) for kind, blob in media]
    own = preparation.untouched
    items = iter(opened)
    messages = [
        {
            **turn,
            "content": [dict(p) if p["type"] == "text" else {**p, p["type"]: next(items)} for p in turn["content"]],
        }
        if isinstance(turn["content"], list)
        else turn
        for turn in turns
    ]
    try:
        if preparation.processor.suffix:
            question, answer = (turn["content"] for turn in turns)
            more = {"images": opened, "suffix": answer}
            return dict(own(text=question, return_tensors="pt", **more))
        one_list = media and "image" in preparation.processor.kinds and not preparation.processor.nested
        if one_list or any(kind == "video" for kind, _ in media):  # files, which it decodes by torchcodec
            text = own.apply_chat_template(turns, chat_template=preparation.chat.template, tools=tools)
            by_kind = {kind: [[x for k, x in zip(media, opened, strict=True) if k[0] == kind]] for kind, _ in media}
            given = {**preparation.processor.arguments(by_kind), **preparation.processor.options, **more}
            given |= preparation.processor.without_bos(text)  # as `apply_chat_template` does it
            if "video" in by_kind:
                asked = any(given.get(key) for key in ("fps", "num_frames", "do_sample_frames"))
                given["do_sample_frames"] = asked or own.video_processor.do_sample_frames
                if bool(given.get("fps")) != bool(given.get("num_frames")):  # not what the directory says of the other
                    given = {"fps": None, "num_frames": None, **given}
            return dict(own(text=[text], return_tensors="pt", **given))
        if not preparation.chat.takes_parts and media:
            return None
        made = own.apply_chat_template(
            messages,
            chat_template=preparation.chat.template,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={**preparation.processor.options, **more},
        )
        return dict(made)
    except Exception as error:  # of transformers' own
        raise SelfCheckError(
            f"sample {part.meta(index).id!r}: transformers' {type(own).__name__} cannot take it: {error}"
        ) from error


def _opened(preparation: Preparation, kind: str, blob: Blob) -> Any:
    """An item; a video with all of its frames, as transformers decodes it and samples them."""
    ours = preparation.opened(kind, blob, blob.read())
    if not isinstance(ours, Clip):
        return ours
    with tempfile.NamedTemporaryFile(suffix=Path(blob.name).suffix) as file:
        file.write(blob.read())
        file.flush()
        frames, metadata = hf("video_utils.load_video")(file.name)
    return Clip(frames, metadata)


def _check_tensors(sample: Sample, made: Mapping[str, Any], own: Any) -> None:
    for unit in sample.units.values():
        for key, ours in unit.items():
            theirs: Tensor = as_tensor(made[key])
            what = f"sample {sample.id!r}: {key}: "
            if ours.shape != theirs.shape:
                raise SelfCheckError(f"{what}{ours.shape}, and {theirs.shape} by transformers' {type(own).__name__}")
            if len(far := (ours != theirs).nonzero()):
                at = tuple(far[0].tolist())
                raise SelfCheckError(
                    f"{what}{len(far)} of {ours.numel()} differ, first {list(at)}: {ours[at]}, and {theirs[at]} by "
                    f"transformers' {type(own).__name__}"
                )


def _check_tokens(sample: str, ours: list[int], theirs: list[int], own: Any) -> None:
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    said = [repr(own.tokenizer.decode(ids[at : at + 1])) if at < len(ids) else "the end" for ids in (ours, theirs)]
    raise SelfCheckError(
        f"sample {sample!r}: input_ids: token {at} of {len(ours)} is {said[0]}, and {said[1]} of {len(theirs)} by "
        f"transformers' {type(own).__name__}"
    )
