"""A directory's own processor, transformers' `AutoProcessor`: a text and media -> tokens, and tensors by kind.

The unit of tensors is all media of a kind in one sample: processors look at a sample's other images before they cut one
into tiles. What a processor is asked to do is written down while it does it: the text that it is about to expand, what
it puts in the place of each item, and the offsets of the tokens that its tokenizer makes.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from hetmesh.errors import RecipeError
from hetmesh.files import read_object
from hetmesh.models.config_keys import hf
from hetmesh.models.split.made import Made, PlaceOfItem, as_tensor, place_of, places_between
from hetmesh.recipe.hf_families import part_of

ARGUMENTS: Mapping[str, str] = MappingProxyType({"image": "images", "video": "videos", "audio": "audio"})
"""Kind of media -> the argument of a processor that takes it."""

PARTS: Mapping[str, str] = MappingProxyType(
    {"image": "image_processor", "video": "video_processor", "audio": "_audio_processor"}
)
"""Kind of media -> the attribute of a processor that prepares it."""

OF_MODEL = ("patch_size", "merge_size", "temporal_patch_size")
"""Options that say how the tower cuts images. Of another merge size patches come in another order, as many."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Clip:
    """The frames of a video that a processor wants, uint8 `[frames, height, width, 3]`, and transformers' metadata of
    it, which say when they are; how many frames were decoded for that, and how many had to be."""

    frames: np.ndarray
    metadata: Any
    decoded: int = 0
    needed: int = 0


def clip(frames: np.ndarray, fps: float = 2.0) -> Clip:
    """All frames of a video."""
    count, height, width, _ = frames.shape
    made = hf("video_utils.VideoMetadata")(count, fps, width, height, count / fps, frames_indices=list(range(count)))
    return Clip(frames, made)


class Processor:
    """Made by `processor_at`.

    Attributes:
        own, tokenizer: transformers' processor and its tokenizer. Not for changing.
        kinds: of media that it prepares.
        lists: names of what it makes of media in lists of numbers, in which the model wants it; known with `keys`.
        suffix: whether it takes the answer apart from the question (PaliGemma), one of each.
    """

    def __init__(self, path: Path, key: str, options: Mapping[str, Any]) -> None:
        self.path, self.key, self.options = path, key, dict(options)
        self.own = _loaded(path, key)
        self.tokenizer = self.own.tokenizer
        self.kinds = tuple(
            kind
            for kind in ARGUMENTS
            if getattr(self.own, PARTS[kind], None) is not None and getattr(self.own, f"{kind}_token", None)
        )
        taken = inspect.signature(type(self.own).__call__).parameters
        self.suffix = "suffix" in taken
        self._absent: dict[str, Any] = dict.fromkeys(taken.keys() & set(ARGUMENTS.values()))  # some have no default
        self._check_options()
        self._text, self._expanded, self._runs_as_one = "", "", False
        self._places: list[PlaceOfItem] | None = None
        self.lists = set[str]()
        self._encoded, self._offsets = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
        self._record()

    def _check_options(self) -> None:
        known = {"fps", "num_frames", "do_sample_frames"} if "video" in self.kinds else set()
        for kind in self.kinds:
            for taken in (
                getattr(getattr(self.own, PARTS[kind]), "valid_kwargs", None),
                self.own.valid_processor_kwargs,
            ):
                known |= set(getattr(taken, "__annotations__", ()))
        if unknown := sorted(set(self.options) - known):
            raise RecipeError(
                f"{self.key}: {type(self.own).__name__} takes no {', '.join(unknown)}; it takes "
                f"{', '.join(sorted(known))}"
            )
        parts = [getattr(self.own, PARTS[kind]) for kind in self.kinds]
        for name, value in self.options.items():
            if name in OF_MODEL and any(getattr(part, name, value) != value for part in parts):
                raise RecipeError(f"{self.key}: processor_options {name} = {value}: the model says it; leave it out")
        if "video" in self.kinds and self._sampling.keys() >= {"fps", "num_frames"}:
            try:
                self.wanted_frames(clip(np.zeros((1000, 1, 1, 3), np.uint8)).metadata)
            except Exception as error:  # whatever a processor raises
                raise RecipeError(f"{self.key}: processor_options fps, num_frames: {error}; leave one out") from error

    @property
    def _sampling(self) -> Mapping[str, Any]:
        """How frames are sampled, as the options say."""
        nested = self.options.get("videos_kwargs")
        asked = self.options | (nested if isinstance(nested, dict) else {})
        return {key: asked[key] for key in ("fps", "num_frames") if asked.get(key)}

    def _record(self) -> None:
        """Have the processor's tokenizer and its expansion of texts note what they do."""
        tokenizer, expand = self.own.tokenizer, self.own.get_text_with_replacements
        tokenize = self._tokenize = type(tokenizer).__call__

        def tokenized(self_: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(text, list) or len(text) != 1:
                return tokenize(self_, text, *args, **kwargs)
            self._expanded = text[0]
            if self._runs_as_one and not args:
                with suppress(ValueError):  # then all of them
                    self._encoded, self._offsets, out = self.tokenized(text[0], kwargs)
                    return out
            out = tokenize(self_, text, *args, **kwargs)
            made = out.encodings[0]
            self._encoded, self._offsets = np.array(made.ids), np.array(made.offsets).reshape(-1, 2)
            return out

        def expanded(text: list[str], *replacements: Any, **named: Any) -> Any:
            self._text = text[0]
            found, places = expand(text, *replacements, **named)
            self._places = [*map(place_of, places[0] if places else [])]
            return found, places

        tokenizer.__class__ = type(type(tokenizer).__name__, (type(tokenizer),), {"__call__": tokenized})
        self.own.get_text_with_replacements = expanded

    def written(self, kind: str) -> str:
        """What a chat template writes for an item."""
        return str(getattr(self.own, f"{kind}_placeholder_token", None) or getattr(self.own, f"{kind}_token"))

    def __call__(
        self,
        text: str,
        media: Mapping[str, Sequence[Any]],
        answer: str | None = None,
        blanks: Mapping[str, Sequence[Any]] = MappingProxyType({}),
        runs_as_one: bool = False,
    ) -> Made:
        """Prepare one text, with as many items of each kind as it has places for. Raises whatever the processor raises.

        Args:
            answer: of a processor that takes a `suffix`.
            blanks: sizes of media of which only the rows are asked for, and videos as blank clips; their units are not
                whole.
            runs_as_one: whether of runs of row tokens one is tokenised (`tokenized`).
        """
        options = self.options | self.without_bos(text)
        given = {kind: [items] for kind, items in media.items() if items}
        for kind, sizes in blanks.items():
            given[kind] = [[size if isinstance(size, Clip) else self.blank(kind, size) for size in sizes]]
        options |= self._absent | self.arguments(given)
        if answer is not None:
            options["suffix"] = answer
        keys = {kind: self.keys[kind] for kind in given}  # which the first time calls the processor itself
        self._text, self._places, self._runs_as_one = text, None, runs_as_one
        try:
            out = self.own(text=[text], return_tensors="pt", **options)
        finally:
            self._runs_as_one = False
        ids = np.asarray(out["input_ids"][0])
        before = len(ids) - len(self._encoded)
        if before < 0 or not np.array_equal(ids[before:], self._encoded):
            raise ValueError(f"{type(self.own).__name__} changes tokens after its tokenizer made them")
        offsets = np.concatenate([np.zeros((before, 2), np.int64), self._offsets])
        types = out.get("token_type_ids") if answer is not None else None
        said = [bool(each) for each in types[0]] if types is not None else []
        units = {kind: {key: as_tensor(out[key]) for key in keys[kind] if key in out} for kind in given}
        if (places := self._places) is None:
            places = places_between(text, self._expanded, {self.written(kind): kind for kind in self.kinds})
        return Made(self._text, self._expanded, ids, offsets, places, units, said)

    def without_bos(self, text: str) -> dict[str, Any]:
        """The option that a text needs which begins with a BOS, as in `apply_chat_template`."""
        bos = self.tokenizer.bos_token
        return {"add_special_tokens": False} if bos and text.startswith(bos) else {}

    def arguments(self, media: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, Any]:
        """What the processor is called with: by kind the items of each sample; of videos `Clip`s."""
        found: dict[str, Any] = {}
        for kind, samples in media.items():
            if kind == "audio":
                found |= {"audio": [item for items in samples for item in items], "sampling_rate": self.sampling_rate}
            elif kind == "video":
                found |= {"videos": [[clip.frames for clip in items] for items in samples], "do_sample_frames": False}
                found["video_metadata"] = [[clip.metadata for clip in items] for items in samples]
                found["return_metadata"] = True  # without which some do not write when frames are
            elif self.nested:
                found["images"] = [list(items) for items in samples]
            else:
                found["images"] = [item for items in samples for item in items]
        return found

    @cached_property
    def nested(self) -> bool:
        """Whether it takes images as a list for each text; else as one list for all."""
        image = self.blank("image", EXAMPLES["image"][0])
        given = {"text": [self.written("image")], "return_tensors": "pt", **self.options}
        for images, nested in (([[image]], True), ([image], False)):
            with suppress(Exception):  # whatever a processor raises
                self.own(images=images, **given)
                return nested
        return True

    @property
    def sampling_rate(self) -> int:
        """Of recordings, per second."""
        return int(self.own._audio_processor.sampling_rate)

    def blank(self, kind: str, size: Sequence[int]) -> Any:
        """Media of a kind without content.

        Args:
            size: `(height, width)` of an image, `(frames, height, width)` of a video, `(samples,)` of a recording.
        """
        from PIL import Image

        if kind == "image":
            return Image.new("RGB", (size[1], size[0]))
        return np.zeros(size, np.float32) if kind == "audio" else clip(np.zeros((*size, 3), np.uint8))

    def wanted_frames(self, metadata: Any) -> list[int]:
        """Which frames of a video the processor samples: as its options or its directory say, else all."""
        part, given = self.own.video_processor, self._sampling
        if not given and not self.options.get("do_sample_frames", part.do_sample_frames):
            return list(range(metadata.total_num_frames))
        known = {key: getattr(part, key, None) for key in part.valid_kwargs.__annotations__}
        # one of both, and not what the directory says of the other
        chosen = {"fps": None, "num_frames": None, **given} if given else {}
        return [int(index) for index in part.sample_frames(metadata, **known | chosen)]

    @cached_property
    def keys(self) -> Mapping[str, tuple[str, ...]]:
        """Kind of media -> names of its tensors: what the output for an item has beside that of a text."""

        def found(kind: str) -> tuple[str, ...]:
            given = self.arguments({kind: [[self.blank(kind, EXAMPLES[kind][0])]]})
            out = self.own(text=[self.written(kind)], return_tensors="pt", **(self.options | given))
            names = set(out) - _TEXT_KEYS
            lists = [name for name in names if isinstance(out[name], list)]
            self.lists |= {name for name in lists if not any(isinstance(value, Tensor) for value in out[name])}
            return tuple(sorted(names))

        return _ByKind(self, found)

    @cached_property
    def row_tokens(self) -> Mapping[str, int]:
        """Kind of media -> the token whose places its rows take: that of config.json, else the most frequent one of
        what is put in an item's place."""
        config, special = part_of(read_object(self.path / "config.json")), set(self.tokenizer.added_tokens_decoder)

        def found(kind: str) -> int:
            made = self(self.written(kind), {kind: [self.blank(kind, EXAMPLES[kind][1])]})
            inside = [
                i
                for i, (a, b) in zip(made.ids.tolist(), made.offsets.tolist(), strict=True)
                if any(start < b and a < stop for start, stop in (place.after for place in made.places))
            ]
            named = [config.get(f"{kind}_token_{key}") for key in ("id", "index")]
            inside = [i for i in inside if i in named] or [i for i in inside if i in special] or inside
            return Counter(inside or made.ids.tolist()).most_common(1)[0][0]

        return _ByKind(self, found)

    def tokenized(self, text: str, arguments: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, Any]:
        """Ids of a text, int64 `[tokens]`, the characters that each stands for, `[tokens, 2]`, and all that its
        tokenizer makes when it is called with `arguments`: of each run of a row token one is tokenised, and repeated.
        Raises ValueError: its tokens are not the runs, or it may pad or cut them."""
        pads = arguments.get("padding") == "max_length" or arguments.get("pad_to_multiple_of")
        if pads or arguments.get("truncation"):
            raise ValueError("what is padded or cut depends on how many tokens there are")
        times, tensors = list[int](), arguments.get("return_tensors")

        def one(run: re.Match[str]) -> str:
            times.append(len(run[0]) // len(run[1]))
            return run[1]

        row_ids, runs = self._runs
        made = self._tokenize(self.tokenizer, [runs.sub(one, text)], **{**arguments, "return_tensors": None})
        ids, copies = np.array(made.encodings[0].ids), np.ones(len(made.encodings[0].ids), np.int64)
        copies[(ids[:, None] == row_ids).any(1)] = times  # raises ValueError where they are others
        offsets = np.repeat(np.array(made.encodings[0].offsets).reshape(-1, 2), copies, axis=0)
        further = offsets[:, 1] - offsets[:, 0]
        further[np.cumsum(copies) - copies] = 0  # the first of each run was there
        offsets += (np.cumsum(further) * offsets.any(1))[:, None]  # some tokens stand for no text
        repeated = {key: np.repeat(values, copies, axis=1) for key, values in made.items()}
        whole = type(made)({k: v if tensors else v.tolist() for k, v in repeated.items()}, tensor_type=tensors)
        return np.repeat(ids, copies), offsets, whole

    @cached_property
    def _runs(self) -> tuple[np.ndarray, re.Pattern[str]]:
        """Row tokens that are special ones, which a tokenizer finds before anything else, and their runs."""
        special = self.tokenizer.added_tokens_decoder
        known = [token for token in set(self.row_tokens.values()) if token in special]
        texts = "|".join(re.escape(special[token].content) for token in known)
        return np.array(known, np.int64), re.compile(rf"({texts or '(?!)'})\1*")


class _ByKind(dict[str, T]):
    """Values by kind of media, found when they are asked for. Raises RecipeError: the processor takes no such media."""

    def __init__(self, processor: Processor, found: Callable[[str], T]) -> None:
        self._processor, self._found = processor, found

    def __missing__(self, kind: str) -> T:
        try:
            value = self[kind] = self._found(kind)
        except RecipeError:
            raise
        except Exception as error:  # whatever a processor raises
            options = f" with {self._processor.options}" if self._processor.options else ""
            raise RecipeError(
                f"{self._processor.key}: {type(self._processor.own).__name__} does not take {kind!r} of size "
                f"{EXAMPLES[kind][0]}{options}: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        return value


EXAMPLES: Mapping[str, tuple[tuple[int, ...], ...]] = MappingProxyType(
    {
        "image": ((60, 180), (230, 150), (90, 90)),
        "video": ((4, 64, 96), (8, 112, 84), (4, 64, 96)),
        "audio": ((3200,), (16000,), (7200,)),
    }
)
"""Sizes of a small item, of a larger one, and of one more; that of the last recording is no even number of frames."""

_TEXT_KEYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}) | {
    "text_replacement_offsets",
    "video_metadata",
}


SECONDS = ("second_per_grid_ts", "video_second_per_grid")
"""How long a frame of a video's grid lasts, where positions depend on it."""


def position_keys(kind: str) -> tuple[str, ...]:
    """What a processor makes of media of a kind that positions depend on."""
    return f"{kind}_grid_thw", *(SECONDS if kind == "video" else ())


def processor_at(path: Path, key: str, options: Mapping[str, Any] = MappingProxyType({})) -> Processor:
    """The processor of a directory; made once. Raises RecipeError: transformers cannot load one, or it does not know an
    option. `key`: of the recipe, for errors."""
    stamps = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(path.glob("*.json")))
    return _processor_at(path.resolve(), key, stamps, json.dumps(dict(options), sort_keys=True))


@lru_cache(maxsize=8)
def _processor_at(path: Path, key: str, stamps: Any, options: str) -> Processor:
    return Processor(path, key, json.loads(options))


def _loaded(path: Path, key: str) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads, from the first list of texts on, forbid forks
    try:
        own = hf("AutoProcessor").from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken directory leads to
        raise RecipeError(f"{key}: transformers cannot load its processor: {shorten(str(error), 500)}") from error
    if not isinstance(own, hf("ProcessorMixin")) or getattr(own, "tokenizer", None) is None:
        raise RecipeError(
            f"{key}: transformers finds no processor of texts and media in it but {type(own).__name__}; it takes "
            "processor_config.json (or preprocessor_config.json) beside the tokenizer"
        )
    return own
