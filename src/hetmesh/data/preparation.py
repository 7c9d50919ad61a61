"""Conversations as a directory's own processor prepares them: tokens, targets, rows and tensors.

Metadata need headers alone (`FromSizes`). Targets are found in the text that the chat template writes, and move along
with what the processor puts in the place of items; that tokens stand for what the assistant said is always checked.
"""

from __future__ import annotations

import bisect
import io
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from hetmesh._processes import one_torch_thread
from hetmesh.data.chat import Chat, runs_of
from hetmesh.data.generated import Generated
from hetmesh.data.images import open_image, upright, upright_size
from hetmesh.data.media_files import (
    VideoHeader,
    check_pixels,
    read_frames,
    read_recording,
    recording_header,
    video_header,
)
from hetmesh.data.media_reader import reading
from hetmesh.data.source import Sample, wants
from hetmesh.data.stores.store import Blob
from hetmesh.data.turns import NOTHING, Further
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models.config_keys import hf
from hetmesh.models.split.from_sizes import FromSizes
from hetmesh.models.split.made import Made, Unit
from hetmesh.models.split.processor import PARTS, SECONDS, Clip, Processor, processor_at
from hetmesh.models.split.rope_index import PICOSECONDS

Media = Sequence[tuple[str, Blob]]
"""Kind and file of each item, in order."""

NO_TURN = -1


@dataclass(frozen=True)
class Turns:
    """A conversation in the form in which the processor takes it.

    Attributes:
        text: what the chat template writes; of a processor that takes answers apart, the question.
        spans: characters `(start, stop, turn)` of it that are targets.
        answer: of a processor that takes answers apart.
        values: what targets have of each value, by their turns.
    """

    text: str
    spans: tuple[tuple[int, int, int], ...]
    answer: str | None = None
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Preparation:
    """A processor with a chat template.

    Args:
        folder: a Hugging Face directory with a processor, none of whose code is run.
        options: of its processor (`size`, `num_frames`, ...), passed through.
        template: a chat template instead of the directory's own.
        key: prefix of the recipe keys in errors.
        generated: kinds that the assistant makes, whose tokens the processor takes as text.

    Raises:
        RecipeError: torchvision is not there, there is no such processor, it does not know an option, or its template
            does not write items as it expects them.
    """

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any],
        template: str | None,
        key: str,
        generated: Mapping[str, Generated] = MappingProxyType({}),
    ) -> None:
        try:
            import torchvision  # noqa: F401
        except Exception as error:  # one of another torch raises RuntimeErrors
            need = f"{key} processor = '{folder}': transformers' processors need torchvision"
            raise RecipeError(f"{need}: {error}; pip install 'hetmesh[media]'") from error
        self.processor = processor_at(folder, f"{key} processor = '{folder}'", options)
        kinds = self.processor.kinds
        self._from_sizes = FromSizes(self.processor)
        stored = self.processor.own.chat_template
        default = stored.get("default") if isinstance(stored, Mapping) else stored
        texts = {kind: self.processor.written(kind) for kind in kinds}
        if not (template or default or self.processor.suffix):
            raise RecipeError(
                f"{key} processor = '{folder}': there is no chat template in it; write the whole form of a "
                f"conversation as {key} chat_template, with {list(texts.values())} for media"
            )
        self._generated = generated
        self.chat = Chat(folder, texts, template or default, key, generated)
        if "video" in texts and not self.chat.takes_parts:  # it may know images alone
            fewer = {kind: text for kind, text in texts.items() if kind != "video"}
            if fewer and (chat := Chat(folder, fewer, template or default, key, generated)).takes_parts:
                kinds, self.chat = tuple(fewer), chat
        self.placeholders, self._refused = dict[str, int](), dict[str, str]()
        for kind in kinds:  # one that it cannot make hinders no others
            try:
                with one_torch_thread():
                    self.placeholders[kind] = self.processor.row_tokens[kind]
            except RecipeError as error:
                if kind == kinds[0]:
                    raise
                self._refused[kind] = str(error)
        for kind, token in self.chat.generated.items():
            if token in self.placeholders.values():
                raise RecipeError(
                    f"{key} generated.{kind}: {generated[kind].token!r} stands for media that the model reads"
                )

    def why_not(self, kind: str) -> str:
        """Why there is no placeholder for media of that kind."""
        if kind in self.processor.kinds:
            return self._refused.get(kind, f"the chat template writes no {kind!r}")
        return f"{type(self.processor.own).__name__} takes {', '.join(self.processor.kinds)}"

    def turns(self, name: str, messages: Sequence[tuple[str, str]], further: Further = NOTHING) -> Turns:
        """A conversation of `(role, text)` turns. Raises SampleError: template or processor do not take it."""
        if not self.processor.suffix:
            text, spans = self.chat.text_and_spans(name, messages, further)
            return Turns(text, spans, values=further.values)
        roles = [role for role, _ in messages]
        if roles not in (["user", "assistant"], ["user"]) or further.untrained:
            raise SampleError(
                f"sample {name!r}: {type(self.processor.own).__name__} takes a question and its answer, got turns of "
                f"{roles}{' with weights' if further.untrained else ''}"
            )
        return Turns(messages[0][1], (), messages[1][1] if len(messages) == 2 else "", further.values)

    def question(self, name: str, messages: Sequence[tuple[str, str]]) -> Turns:
        """A conversation up to where the assistant speaks next."""
        if self.processor.suffix:
            return replace(self.turns(name, messages), answer=None)
        return Turns(self.chat.prompt_text(name, messages), ())

    def meta(self, name: str, turns: Turns, media: Media) -> SampleMeta:
        """The metadata of a conversation, for which at most headers of its media are read. Raises SampleError: one
        cannot be read, or the processor does not take it."""
        return self._prepared(name, turns, media, ())[0]

    def load(
        self, name: str, turns: Turns, media: Media, kinds: Collection[str] | None = None
    ) -> tuple[SampleMeta, Sample]:
        """The conversation with its media of some `kinds` (None: all), and what these cost; errors as in `meta`."""
        meta, made, costs, turn_of = self._prepared(name, turns, media, kinds)
        return meta, replace(self._sample(meta, turns, made, turn_of, kinds), **costs)

    def sample(
        self, name: str, turns: Turns, order: Sequence[str], items: Mapping[str, Sequence[Any]]
    ) -> tuple[SampleMeta, Sample]:
        """The same of opened media: their kinds in order, and items by kind."""
        meta, made, turn_of = self._made(name, turns, order, items, {})
        return meta, self._sample(meta, turns, made, turn_of, None)

    def _sample(
        self, meta: SampleMeta, turns: Turns, made: Made, turn_of: Sequence[int], kinds: Collection[str] | None
    ) -> Sample:
        units = {kind: unit for kind, unit in made.units.items() if wants(kinds, kind)}
        rows = {kind: sum(item.rows for item in meta.media if item.name == kind) for kind in units}
        values = {k: torch.tensor([of[t] for t in turn_of], dtype=torch.float64) for k, of in turns.values.items()}
        return Sample(meta.id, torch.from_numpy(made.ids), units=units, unit_rows=rows, values=values)

    def _prepared(
        self, name: str, turns: Turns, media: Media, kinds: Collection[str] | None
    ) -> tuple[SampleMeta, Made, dict[str, Any], list[int]]:
        items: dict[str, list[Any]] = {}
        blanks: dict[str, list[Any]] = {}
        costs = Counter[str]()
        for kind, blob in media:
            if kind in self._generated:
                continue
            with reading(name, blob):
                if wants(kinds, kind):
                    data = blob.read()
                    items.setdefault(kind, []).append(item := self.opened(kind, blob, data))
                    costs["bytes_read"] += len(data)
                    if isinstance(item, Clip):
                        costs.update(frames_decoded=item.decoded, frames_needed=item.needed)
                else:
                    blanks.setdefault(kind, []).append(self._size(kind, blob))
        meta, made, turn_of = self._made(name, turns, [kind for kind, _ in media], items, blanks)
        return meta, made, costs, turn_of

    def _made(
        self,
        name: str,
        turns: Turns,
        order: Sequence[str],
        items: Mapping[str, Sequence[Any]],
        blanks: Mapping[str, Sequence[Any]],
    ) -> tuple[SampleMeta, Made, list[int]]:
        try:
            if items:
                runs_as_one = turns.answer is None and self._from_sizes.runs_as_one({*items, *blanks})
                made = self.processor(turns.text, items, turns.answer, blanks, runs_as_one)
            else:
                made = self._from_sizes(turns.text, blanks, turns.answer)
        except Exception as error:  # whatever a processor raises
            raise SampleError(
                f"sample {name!r}: {type(self.processor.own).__name__} does not take it: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        placed = placed_items(name, self.processor, made, [kind for kind in order if kind not in self._generated])
        self._check_rows(name, made, placed)
        items_made = self._items_made(name, made, [kind for kind in order if kind in self._generated])
        chosen = self._chosen(name, turns, made) if turns.answer is None else np.where(made.answer, 1, NO_TURN)
        for token in (*self.placeholders.values(), *self.chat.generated.values()):
            chosen[made.ids == token] = NO_TURN
        chosen[:1] = NO_TURN
        in_order = tuple(sorted((*placed, *items_made), key=lambda item: item.position))
        meta = SampleMeta(name, len(made.ids), in_order, runs_of(chosen != NO_TURN))
        return meta, made, chosen[chosen != NO_TURN].tolist()

    def _items_made(self, name: str, made: Made, kinds: Sequence[str]) -> list[MediaItem]:
        """The items that the assistant makes, of these kinds in order. Raises SampleError: the text has others."""
        kind_of = {token: kind for kind, token in self.chat.generated.items()}
        places = [(i, kind_of[token]) for i, token in enumerate(made.ids.tolist()) if token in kind_of]
        if (found := [kind for _, kind in places]) != list(kinds):
            raise SampleError(f"sample {name!r}: its text has places for {found}, the assistant makes {list(kinds)}")
        return [MediaItem(kind, self._generated[kind].fixed_shape, position) for position, kind in places]

    def _check_rows(self, name: str, made: Made, placed: Sequence[MediaItem]) -> None:
        """Raise SampleError for a row token that is no item's. Some templates write another token for an item than
        those that its rows take (Gemma 3), so that a text may hold one."""
        rows = np.isin(made.ids, [*self.placeholders.values()])
        for item in placed:
            rows[item.position : item.stop] = False
        if rows.any():
            token = self.processor.tokenizer.decode(made.ids[rows][:1])
            raise SampleError(f"sample {name!r}: its text contains {token!r}, which stands for media; leave it out")

    def opened(self, kind: str, blob: Blob, data: bytes) -> Any:
        """An item as the processor takes it. Raises OSError, ValueError: it cannot be read."""
        if kind == "audio":
            sound = read_recording(io.BytesIO(data), self.processor.sampling_rate)
            self._check_length(len(sound))
            return sound
        if kind == "video":
            metadata = self._frames(video_header(io.BytesIO(data)))
            pixels, decoded, needed = read_frames(io.BytesIO(data), metadata.frames_indices)
            return Clip(pixels, metadata, decoded, needed)
        with open_image(io.BytesIO(data)) as image:
            return upright(image, bool(getattr(self.processor.own.image_processor, "do_convert_rgb", False)))

    def _frames(self, header: VideoHeader) -> Any:
        """transformers' metadata of a video, with the frames wanted. Raises ValueError: none, or too many."""
        metadata = header.metadata()
        try:
            indices = self.processor.wanted_frames(metadata)
        except Exception as error:  # whatever a processor raises
            name, reason = type(self.processor.own.video_processor).__name__, " ".join(str(error).split())
            seen = f"{header.frames} frames at {header.fps:g} per second"
            raise ValueError(f"{name} cannot sample its {seen}: {reason}") from error
        if not indices:
            raise ValueError(f"the processor takes none of its {header.frames} frames")
        check_pixels(len(indices), header.height, header.width)
        metadata.frames_indices = indices
        return metadata

    def _size(self, kind: str, blob: Blob) -> Any:
        """What stands for an item of which only the rows are asked for."""
        with blob.open() as file:
            if kind == "audio":
                samples = recording_header(file, self.processor.sampling_rate)
                self._check_length(samples)
                return (samples,)
            if kind == "video":
                metadata = self._frames(header := video_header(file))
                shape = len(metadata.frames_indices), header.height, header.width, 3
                return Clip(np.broadcast_to(np.uint8(0), shape), metadata)
            with open_image(file) as image:  # reads the header only
                width, height = upright_size(image)
                return height, width

    def _check_length(self, samples: int) -> None:
        """Raise ValueError for a recording whose end the processor would drop."""
        most = getattr(self.processor.own._audio_processor, "n_samples", samples)
        if samples > most and self._cuts:
            seconds, longest = samples / self.processor.sampling_rate, most / self.processor.sampling_rate
            raise ValueError(
                f"it lasts {seconds:.1f} s, more than the {longest:.1f} s of {type(self.processor.own).__name__}"
            )

    @cached_property
    def untouched(self) -> Any:
        """The processor as transformers loads it."""
        return hf("AutoProcessor").from_pretrained(self.processor.path, local_files_only=True)

    @cached_property
    def _cuts(self) -> bool:
        """Whether a recording of twice the extractor's length becomes no more tokens: some cut, some make pieces."""
        most, text = self.processor.own._audio_processor.n_samples, self.processor.written("audio")
        made = [self.processor(text, {}, blanks={"audio": [(n * most,)]}) for n in (1, 2)]
        return len(made[0].ids) == len(made[1].ids)

    def _chosen(self, name: str, turns: Turns, made: Made) -> np.ndarray:
        """The turn of each token that stands for a part of a span, wherever that has moved; of others `NO_TURN`."""
        before = len(made.given) - len(turns.text)
        if before < 0 or made.given[before:] != turns.text:
            raise SampleError(
                f"sample {name!r}: {type(self.processor.own).__name__} changes the text that it expands, so where the "
                "assistant speaks is not known"
            )
        ends = [place.before[1] for place in made.places]
        gained = [0, *(place.after[1] - place.before[1] for place in made.places)]
        chosen = np.full(len(made.ids), NO_TURN)
        starts, stops = made.offsets.T
        for a, b, turn in turns.spans:
            start, stop = (at + before + gained[bisect.bisect_right(ends, at + before)] for at in (a, b))
            if made.expanded[start:stop] != turns.text[a:b]:
                raise SampleError(
                    f"sample {name!r}: the targets would stand for {made.expanded[start:stop][:80]!r} where the "
                    f"assistant says {turns.text[a:b][:80]!r}"
                )
            chosen[bisect.bisect_right(stops, start) : bisect.bisect_left(starts, stop)] = turn
        chosen[starts == stops] = NO_TURN
        return chosen


def placed_items(name: str, processor: Processor, made: Made, kinds: Sequence[str]) -> tuple[MediaItem, ...]:
    """The items of sample `name`, of these kinds in order, with the runs of their rows, and the grid of these where the
    processor says one. Raises SampleError: the text has places for others."""
    if [place.kind for place in made.places] != list(kinds):
        raise SampleError(
            f"sample {name!r}: its text has places for {[place.kind for place in made.places]}, its media are "
            f"{list(kinds)}; does the chat template drop some, or add its own?"
        )
    found, seen = list[MediaItem](), dict.fromkeys(PARTS, 0)
    question = made.answer.index(True) if any(made.answer) else len(made.ids)
    starts = made.offsets[:question, 0]
    for place in made.places:
        token = processor.row_tokens[place.kind]
        first, stop = (bisect.bisect_left(starts, at) for at in place.after)
        runs = runs_of(made.ids[first:stop] == token)
        if not runs:
            raise SampleError(f"sample {name!r}: the processor gives no rows to its {place.kind!r}")
        spans = tuple((first + begin, end - begin) for begin, end in runs)
        grid = _grid(processor, made.units[place.kind], place.kind, seen[place.kind])
        seen[place.kind] += 1
        found.append(MediaItem(place.kind, (), spans[0][0], sum(rows for _, rows in spans), grid, spans))
    return tuple(found)


def _grid(processor: Processor, unit: Unit, kind: str, number: int) -> tuple[int, ...]:
    grids = unit.get(f"{kind}_grid_thw")
    if grids is None:
        return ()
    frames, height, width = grids[number].tolist()
    merge = int(getattr(processor.own.image_processor, "merge_size", 1) or 1)  # patches along a side of a row
    grid = frames, height // merge, width // merge
    seconds = next((unit[key] for key in SECONDS if kind == "video" and key in unit), None)
    return grid if seconds is None else (*grid, round(float(seconds[number]) * PICOSECONDS))
