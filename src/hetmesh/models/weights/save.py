"""Write tensors as the safetensors files of a Hugging Face directory, and read them back to verify them.

The inverse of `load.py`: one file after another, so that the tensors of only one file are in memory at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hetmesh.errors import OutputError
from hetmesh.files import write_json, writing

LARGEST_FILE = 5_000_000_000
"""Largest file in bytes, unless one tensor is larger; transformers' limit up to version 4."""

NAME = "model"


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of one tensor of a directory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """What was written: number of tensors, their bytes, and the files they are in."""

    tensors: int
    bytes: int
    files: tuple[str, ...]


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Stored],
    read: Callable[[Sequence[str]], Mapping[str, Tensor]],
    largest: int = LARGEST_FILE,
    name: str = NAME,
) -> Written:
    """Write `tensors` into `folder`: one file, or several with their index. Each is read back and compared bit by bit.
    `read`: returns the values of tensors by name; called for the tensors of one file at a time. Raises OutputError: a
    file cannot be written, or differs from what was written."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.bytes,
        filename_pattern=f"{name}{{suffix}}.safetensors",
        max_shard_size=largest,
    )
    for file, names in split.filename_to_tensors.items():
        values = {tensor: value.contiguous() for tensor, value in read(names).items()}
        for tensor in names:
            found = Stored(tuple(values[tensor].shape), values[tensor].dtype)
            if found != tensors[tensor]:
                raise OutputError(f"{folder / file}: {tensor} should be {tensors[tensor]}, and is {found}")
        with writing(folder / file):
            try:
                save_file(values, folder / file, metadata={"format": "pt"})
            except Exception as error:  # safetensors has its own for a full disk
                raise OutputError(f"{folder / file} cannot be written: {error}") from error
            with open(folder / file, "rb") as stream:
                os.fsync(stream.fileno())
        _compare(folder / file, values)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_json(folder / f"{name}.safetensors.index.json", index, indent=2)
    return Written(len(tensors), split.metadata["total_size"], tuple(split.filename_to_tensors))


def _compare(file: Path, values: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as reader:
            if set(reader.keys()) != set(values):
                raise OutputError(f"{file}: its tensors are not those that were written")
            for name, value in values.items():
                found = reader.get_tensor(name)
                if (
                    found.dtype != value.dtype
                    or found.shape != value.shape
                    or not torch.equal(_bits(found), _bits(value))
                ):
                    raise OutputError(f"{file}: {name} is not what was written")
    except (SafetensorError, OSError) as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"{file} cannot be read back: {error}") from error


def as_dtype(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`value` (of tensor `name`) as `dtype`. Raises OutputError if a finite value becomes infinite."""
    found = value.to(dtype)
    if found.dtype != value.dtype and not torch.equal(found.isfinite(), value.isfinite()):
        largest = float(value.nan_to_num(0, 0, 0).abs().max())
        raise OutputError(f"{name} has values up to {largest:.3g}, which {dtype} does not hold; choose another dtype")
    return found


def _bits(tensor: Tensor) -> Tensor:
    """Values as bytes, so that NaN compare by their bits."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


def with_dtype(config: object, dtype: torch.dtype) -> object:
    """The content of a config.json with its dtype, and those of its parts, set to `dtype`."""
    if isinstance(config, list):
        return [with_dtype(part, dtype) for part in config]
    if not isinstance(config, Mapping):
        return config
    named = str(dtype).removeprefix("torch.")
    return {
        key: named if key in ("dtype", "torch_dtype") and not isinstance(value, Mapping) else with_dtype(value, dtype)
        for key, value in config.items()
    }


def write_config(folder: Path, config: Mapping[str, object], dtype: torch.dtype | None) -> None:
    """Write config.json for weights of `dtype`; None: unchanged."""
    content: object = dict(config)
    if dtype is not None:
        content = with_dtype({**config} if {"dtype", "torch_dtype"} & set(config) else {**config, "dtype": None}, dtype)
    with writing(folder / "config.json"):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
