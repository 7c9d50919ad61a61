"""Graphs for drawn recipes whose samples a directory's own processor prepares."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from zlib import crc32

from hypothesis import strategies as st

from hetmesh.models.adapter import Adapter
from hetmesh.recipe.hf_path import expand_hf_path
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from support.recipe_draft import Draft
from surveying import tiny_processor
from surveying.classes import image_text_classes
from surveying.samples import write_samples

FAMILIES = ("llava", "qwen2_5_vl", "idefics3", "llava_onevision", "internvl")
"""Of one tensor per image, patches of any number, tiles in rows, tiles that depend on the other images, tiles alone."""

APART = ("llava", "internvl")
"""Whose projector may be a module."""

DATA = "talks.json"


def kept(name: str) -> Path:
    """The directory of a family in this machine's folder of temporary files, made where it is missing, with
    conversations beside it: about no image, one, and several of unlike sizes; all begin with an answer."""
    version = crc32(Path(__file__).read_bytes() + Path(tiny_processor.__file__).read_bytes())
    folder = Path(gettempdir(), f"hetmesh-processors-{os.getuid()}-{version:08x}")
    if not (path := folder / name).exists():
        made = folder / str(os.getpid()) / name
        tiny_processor.tiny_directory(name, image_text_classes()[name], made)
        write_samples(made / DATA, ["image"])
        talks = json.loads((made / DATA).read_text())
        for talk in talks:
            talk["messages"][:0] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]
        (made / DATA).write_text(json.dumps(talks))
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(path)
    return path


@cache
def whole(name: str, apart: bool) -> tuple[dict[str, Any], Mapping[str, Adapter], list[int]]:
    """A family's recipe with modules and boundaries, its adapters, and how long its samples are; `apart`: its projector
    is a module."""
    path = kept(name)
    data = {"source": "conversations", "options": {"path": str(path / DATA)}}
    modules = {"modules": {"projector": {}}} if apart else {}
    raw = expand_hf_path({"model": {"hf_path": str(path)}, "data": data, **modules})
    tables = {key: raw[key] for key in ("modules", "boundaries", "data")}
    resolved = resolve(parse_recipe({**tables, "training": {"seq_len": 4096}}))
    lengths = [resolved.source.meta(index).tokens for index in range(len(resolved.source))]
    return tables, resolved.adapters, lengths


def processors(draw: st.DrawFn, draft: Draft) -> None:
    """A whole model, tower and projector together or apart, of which `seq_len` may cut images and answers."""
    name = draw(st.sampled_from(FAMILIES))
    tables, adapters, lengths = whole(name, name in APART and draw(st.booleans()))
    draft.tables |= json.loads(json.dumps(tables))
    for table in draft.tables["modules"].values():
        table.setdefault("config", {})
    for name, adapter in adapters.items():
        abilities = adapter.abilities.with_stages()
        draft.heads[name] = math.gcd(*adapter.tensor_parallel_sizes().values()) or 1
        if abilities.activation is not None:
            draft.layers[name] = adapter.layers()
            draft.together[name] = len(abilities.first_layers) or 1, len(abilities.last_layers) or 1
        if not abilities.token_sharded:
            draft.whole += (name,)
    if draw(st.booleans()):
        draft.tables["modules"]["vision"]["trainable"] = False
    draft.table("training")["seq_len"] = draw(st.sampled_from([max(lengths), *sorted(lengths)[:-1:2]]))
