"""Conversations about images and recordings, from files on this machine: JSON, tar shards or tables."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetmesh.data.chat import FILES, Chat, Encoded
from hetmesh.data.chat_template import THOUGHTS
from hetmesh.data.generated import DIMS, OUT, Generated, check_trained
from hetmesh.data.media_files import pyav
from hetmesh.data.media_reader import KEY, MediaReader, reading
from hetmesh.data.metadata_index import SUFFIX, content_hash, file_states, load_index
from hetmesh.data.preparation import Preparation, Turns
from hetmesh.data.source import Sample, SourceAbilities, wants
from hetmesh.data.stores.columns import Columns
from hetmesh.data.stores.open_store import check_exist, find_files, media_blob, open_store
from hetmesh.data.stores.store import Blob, FileSpan, Record
from hetmesh.data.stores.tar_shards import extension
from hetmesh.data.turns import (
    CALLS,
    MARKS,
    check_unread,
    further_of,
    parts_of,
    turns_of,
)
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.meta_arrays import MetaArrays
from hetmesh.graph.sample import SampleMeta
from hetmesh.recipe.hf_path import PROCESSOR_FILES

KINDS = ("image", "video", "audio")
SETTINGS_FILES = (
    *FILES,
    *PROCESSOR_FILES,
    *("special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    "video_preprocessor_config.json",
)
"""Files of a tokenizer or processor that metadata depends on."""

CACHED_CONVERSATIONS = 4096
"""Whose tokens are remembered: metadata and payload of a batch ask for the same ones."""


@dataclass(frozen=True)
class _Conversation:
    id: str
    encoded: Encoded
    media: tuple[tuple[str, Blob], ...]
    size: int  # of its text
    turns: Turns | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)


class ConversationsSource:
    """One conversation per record: `{"id": ..., "messages": [{"role": ..., "content": ...}, ...]}`, or in LLaVA's form:
    `{"id": ..., "image": FILE, "conversations": [{"from": "human", "value": "<image>..."}, {"from": "gpt", ...}]}`.

    `content` is a text, or a list of parts: `{"type": "text", "text": ...}`, `{"type": "image", "image": FILE}`,
    `{"type": "audio", "audio": FILE}`, or as OpenAI and transformers write them (`turns.py`); media may be data URLs,
    and are never downloaded. Roles are those that the tokenizer's chat template knows. The assistant's turns are the
    targets, but for those with `"weight": 0` or `"train": false`. In the text an item becomes its placeholder token.
    Metadata needs the text alone, and an image's header where the size of the result depends on it; with an index
    (`hetmesh index`) neither.

    Args:
        path: a JSON file (one record per line, or a list), a CSV file, tar shards (`"shards/*.tar"`, as webdataset and
            img2dataset have them), or tables (`*.parquet`, `*.arrow`, or a folder that Hugging Face datasets saved).
        processor: a Hugging Face directory whose own processor (`AutoProcessor`) prepares text and media; tokenizer,
            processors of single media and placeholders are then not named.
        processor_options: what it takes besides (`size`, `num_frames`, ...).
        tokenizer: a Hugging Face directory with a fast tokenizer.
        image_processor: a Hugging Face directory whose preprocessor_config.json (or processor_config.json) says how
            to prepare images.
        audio_processor: the same for recordings (WhisperFeatureExtractor).
        placeholders: kind of media -> a token of the vocabulary that texts do not use.
        media_folder: where relative file names start; the folder of `path` if absent. No file elsewhere is read; a list
            names further folders in which files may lie.
        chat_template: a Jinja template instead of the tokenizer's own (without either: Vicuna's form).
        validation_path: the same of held-out conversations, those of the split `"validation"`.
        index: use the index beside the data (`hetmesh index`), if there is one.
        generated: `image_out`, `audio_out` or `tensor_out`, media of the assistant's turns, which modules after the LLM
            make -> token, shape and sampling rate (`Generated`).
        columns, prompt, values: how records are read (`Columns`), and their numbers for a custom loss (`further_of`).

    Raises:
        RecipeError: a file or directory is missing (all that are) or cannot be used; no such split; a stale index.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str | None = None,
        image_processor: str | None = None,
        audio_processor: str | None = None,
        placeholders: Mapping[str, str] | None = None,
        media_folder: str | Sequence[str] | None = None,
        chat_template: str | None = None,
        validation_path: str | None = None,
        split: str = "train",
        index: bool = True,
        processor: str | None = None,
        processor_options: Mapping[str, Any] | None = None,
        columns: Mapping[str, str] | None = None,
        prompt: str = "",
        values: Sequence[str] = (),
        generated: Mapping[str, Any] | None = None,
    ) -> None:
        if (processor is None) == (tokenizer is None):
            raise RecipeError(f"{KEY} processor, tokenizer: one of them, and not both, must be given")
        own = {"image_processor": image_processor, "audio_processor": audio_processor, "placeholders": placeholders}
        if processor is not None and (given := [name for name, value in own.items() if value is not None]):
            raise RecipeError(f"{KEY} {', '.join(given)}: the processor of {processor!r} says it; leave it out")
        placeholders = {"image": "<image>"} if placeholders is None else placeholders
        if unknown := sorted(set(placeholders) - set(KINDS)):
            raise RecipeError(f"{KEY} placeholders: unknown kinds of media {unknown}; valid are {list(KINDS)}")
        if split not in ("train", "validation") or (split == "validation" and validation_path is None):
            held_out = "" if validation_path else ", 'validation' needs validation_path"
            raise RecipeError(f"{KEY} split: must be 'train' or 'validation'{held_out}, got {split!r}")
        folders = {"tokenizer": tokenizer, "image_processor": image_processor, "audio_processor": audio_processor}
        folders["processor"] = processor
        places = [media_folder] if isinstance(media_folder, str) else list(media_folder or ())
        named = [*folders.items(), *(("media_folder", place) for place in places)]
        check_exist({"path": path, "validation_path": validation_path}, named, KEY)
        name = "path" if split == "train" else "validation_path"
        self.path = Path(path if split == "train" else str(validation_path)).expanduser()
        made = {kind: Generated(kind, table, f"{KEY} generated") for kind, table in (generated or {}).items()}
        self.preparation: Preparation | None = None
        if processor is not None:
            folder = Path(processor).expanduser()
            self.preparation = Preparation(folder, processor_options or {}, chat_template, KEY, made)
            self._chat = self.preparation.chat
        else:
            self._chat = Chat(Path(str(tokenizer)).expanduser(), placeholders, chat_template, KEY, made)
        self.vocab_size, self.pad_id = self._chat.vocab_size, self._chat.pad_id
        read = (self.preparation or self._chat).placeholders
        self.placeholders: Mapping[str, int] = {**read, **self._chat.generated}
        self._made, self._reader = made, MediaReader(image_processor, audio_processor, made)
        options: dict[str, Any] = {"placeholders": placeholders, "chat_template": chat_template}
        if processor is not None:
            options = {"processor_options": processor_options or {}, "chat_template": chat_template}
            options["transformers"] = version("transformers")
        more = {"columns": columns, "prompt": prompt, "values": list(values), "generated": generated}
        options |= {k: v for k, v in more.items() if v}
        if self._chat.breaks:
            options["breaks"] = sorted(self._chat.breaks)
        paths = [Path(folder).expanduser() for folder in folders.values() if folder is not None]
        files = [file for folder in paths for file in sorted(folder.iterdir()) if file.name in SETTINGS_FILES]
        self._settings = {"the options of [data]": options, "tokenizer or processors": content_hash(files)}
        key, indexed = f"{KEY} {name}", None
        self._known: MetaArrays | None
        if index:
            indexed = load_index(self.index_path, self._inputs(find_files(str(self.path), key)))
        self._known, arrays = (None, None) if indexed is None else indexed
        self.values, roots = tuple(values), [Path(place).expanduser() for place in places]
        self._columns = Columns(columns, prompt, self.values)
        self._store = open_store(str(self.path), roots, key, arrays, self._columns)
        self._conversation = lru_cache(CACHED_CONVERSATIONS)(self._read)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def index_path(self) -> Path:
        """Where its index is kept: beside the data."""
        name = "".join("_" if c in "*?[]" else c for c in self.path.name)
        return self.path.parent / (name + SUFFIX)

    @property
    def index_inputs(self) -> Mapping[str, Any]:
        """What an index depends on, as JSON has it: the state of the files, and options that metadata depend on."""
        return self._inputs(self._store.files)

    @property
    def store_arrays(self) -> Mapping[str, np.ndarray]:
        """Where records lie in the files, which an index keeps, too."""
        return self._store.arrays

    def _inputs(self, files: Sequence[Path]) -> dict[str, Any]:
        return {**self._settings, "the files of the data": file_states(files)}

    def meta(self, index: int) -> SampleMeta:
        """Metadata of conversation `index`. Raises SampleError: it is none, or a header of its media cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: index {index} is not in 0..{len(self) - 1}")
        if self._known is not None:
            return self._known.meta(index)
        conversation = self._conversation(index)
        if self.preparation is not None and conversation.turns is not None:
            return self.preparation.meta(conversation.id, conversation.turns, conversation.media)
        fixed = set(self.placeholders.values())
        positions = [i for i, token in enumerate(conversation.encoded.ids) if token in fixed]
        items = tuple(
            self._reader.item(conversation.id, kind, blob, position)
            for position, (kind, blob) in zip(positions, conversation.media, strict=True)
        )
        return SampleMeta(conversation.id, len(conversation.encoded.ids), items, conversation.encoded.targets)

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """The conversation with its images (`[3, height, width]`, or as tiles `[tiles, 3, height, width]`) and its
        recordings (`[mel bins, frames]`), float32, and what is made (`Generated`). Raises SampleError: a media file
        cannot be read."""
        conversation = self._conversation(index)
        media: dict[str, list[Tensor]] = {}
        read = needed = conversation.size
        for kind, blob in conversation.media:
            if wants(kinds, kind):
                with reading(conversation.id, blob):
                    needed += blob.length
        for kind, blob in conversation.media:
            if wants(kinds, kind) and (self.preparation is None or kind in self._made):
                tensor, size = self._reader.load(conversation.id, kind, blob)
                media.setdefault(kind, []).append(tensor)
                read += size
        if self.preparation is not None and conversation.turns is not None:
            _, sample = self.preparation.load(conversation.id, conversation.turns, conversation.media, kinds)
            return replace(sample, media=media, bytes_read=read + sample.bytes_read, bytes_needed=needed)
        tokens = torch.from_numpy(np.array(conversation.encoded.ids, np.int64))
        return Sample(conversation.id, tokens, media, read, needed, values=conversation.values)

    @property
    def abilities(self) -> SourceAbilities:
        """All that there are; with an index it has the metadata of its samples as arrays."""
        metas = None if self._known is None else self._known.take
        shapes = {kind: item.fixed_shape for kind, item in self._made.items()}
        named = metas, self.check_files, self.decode, lambda: self.end_ids, self._notes, self.values
        return SourceAbilities(*named, media_shapes=shapes)

    def _notes(self) -> tuple[str, ...]:
        return *self._chat.notes, *self._columns.notes

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._chat.end_ids

    def prompt(self, text: str, media: Sequence[tuple[str, Path]]) -> tuple[SampleMeta, Sample]:
        """A question in the form that the conversations have, up to where the assistant speaks.

        Items are at the marks of the text (`<image>`, `<audio>`), or before it where it has none. Raises SampleError:
        another number of marks than items, or a file that cannot be read."""
        name = "question"
        if not any(mark in text for mark in MARKS):
            text = "".join(f"<{kind}>" for kind, _ in media) + text
        by_kind = {kind: [str(path) for other, path in media if other == kind] for kind in KINDS}
        record = {**by_kind, "conversations": [{"from": "human", "value": text}]}
        try:
            ((_, parts),) = turns_of(record, self._chat.breaks_of)
        except ValueError as error:
            raise SampleError(f"{name}: {error}") from error
        if any(part["type"] not in part for part in parts):
            raise SampleError(f"{name}: more marks in the text than files, of which there are {len(media)}")
        named: list[tuple[str, str | None]] = []
        messages = [("user", self._text(name, parts, named))]
        blobs = tuple((kind, FileSpan(Path(str(value)))) for kind, value in named)
        if self.preparation is not None:
            return self.preparation.load(name, self.preparation.question(name, messages), blobs)
        ids = self._chat.prompt(name, messages)
        if (written := self._kinds_in(ids)) != [kind for kind, _ in named]:
            raise SampleError(f"{name}: the chat template makes placeholders of {written} of {[k for k, _ in named]}")
        conversation = _Conversation(name, Encoded(ids, ()), blobs, 0)
        asked = copy.copy(self)
        asked._known, asked._conversation = None, lambda _: conversation  # type: ignore[assignment]
        return asked.meta(0), asked.load(0)

    def _kinds_in(self, tokens: Sequence[int]) -> list[str]:
        """Kinds of the media for which there are placeholders among `tokens`, in order."""
        kinds = {token: kind for kind, token in self.placeholders.items()}
        return [kinds[token] for token in tokens if token in kinds]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids up to the first end token."""
        ids = itertools.takewhile(lambda token: token not in self.end_ids, map(int, tokens))
        return self._chat.tokenizer.decode(list(ids), skip_special_tokens=True).strip()

    def turns(self, index: int) -> tuple[list[dict[str, Any]], Sequence[Any] | None, list[tuple[str, Blob]]]:
        """Conversation `index` as the chat template takes it, its tools, and its media in order that are read."""
        stored, _, messages, media = self._record(index)
        further = further_of(stored.value, self.values)
        return self._chat.turns(messages, further), further.tools, [each for each in media if each[0] not in self._made]

    def check_files(self, index: int, kinds: Collection[str] | None = None) -> list[str]:
        """Look for the media files that conversation `index` names, of these kinds, and open none. Gives the extensions
        of the tar members beside it that it does not name, which nobody reads. Raises SampleError: the record is no
        conversation, or a file is not there."""
        stored, name, messages, media = self._record(index)
        for kind, blob in media:
            by_pyav = kind.removesuffix(OUT) in ("audio", "video")
            if by_pyav and (self.preparation is not None or kind in self._made):
                pyav(f"{KEY} path: sample {name!r} has a {kind}")
            try:
                if wants(kinds, kind):
                    _ = blob.length
            except OSError as error:
                raise SampleError(f"sample {name!r}: cannot read {blob}: {error}") from error
        if any(role == "assistant" and mark in said for role, said in messages for mark in self._chat.reserved):
            self.meta(index)  # templates that write an answer's items otherwise refuse it
        named = {blob.name for _, blob in media}
        return [extension(other) for other in stored.beside if other not in named]

    def _read(self, index: int) -> _Conversation:
        stored, name, messages, media = self._record(index)
        further = further_of(stored.value, self.values)
        if self.preparation is not None:
            turns = self.preparation.turns(name, messages, further)
            return _Conversation(name, Encoded((), ()), tuple(media), stored.size, turns)
        encoded = self._chat.encode(name, messages, further)
        if (written := self._kinds_in(encoded.ids)) != (kinds := [kind for kind, _ in media]):
            raise SampleError(
                f"sample {name!r}: its text has placeholders of {written}, its media are {kinds}; "
                "does the chat template drop some, or add its own?"
            )
        values = {k: torch.from_numpy(np.array(of)[[*encoded.turns]]) for k, of in further.values.items()}
        return _Conversation(name, encoded, tuple(media), stored.size, values=values)

    def _record(self, index: int) -> tuple[Record, str, list[tuple[str, str]], list[tuple[str, Blob]]]:
        """Record `index`: its sample's id, turns as role and text, and its media."""
        stored = self._store.record(index)
        name, record = stored.name, None
        try:
            record = stored.value
            if record.get("id") is not None:
                name = str(record["id"])
            turns = turns_of(record, self._chat.breaks_of)
            check_unread(record, self._chat.joins_texts)
            further = further_of(record, self.values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if record is not None and type(error) is ValueError:  # whose text says what is wrong
                raise SampleError(f"sample {name!r}: {error}") from error
            raise SampleError(
                f"sample {name!r}: must be an object with `messages`, a list of {{role, content}}: {error!r}"
            ) from error
        named: list[tuple[str, str | None]] = []
        messages = [(role, self._text(name, content, named, role)) for role, content in turns]
        check_trained(name, messages, further.untrained, self._made, f"{KEY} generated")
        self._chat.check_written(name, messages, further)
        for i, (role, said) in enumerate(messages):
            spoken = said.strip() or any(further.keys[i].get(key) for key in (*CALLS, *THOUGHTS))
            if role == "assistant" and not spoken and i not in further.untrained:
                raise SampleError(
                    f"sample {name!r}: turn {i}, the assistant's, is empty: the model would learn to end at once; give "
                    'the turn "train": false, or leave the sample out'
                )
        media: list[tuple[str, Blob]] = []
        for at, (kind, value) in enumerate(named):
            form = kind.removesuffix(OUT)
            before = sum(other.removesuffix(OUT) == form for other, _ in named[:at])
            try:
                media.append((kind, media_blob(self._store, index, at, form, value, before)))
            except (OSError, ValueError) as error:
                raise SampleError(f"sample {name!r}: {error}") from error
        for kind, count in self._store.media_counts(index).items():
            used = sum(other.removesuffix(OUT) == kind for other, _ in named)
            if self.placeholders.keys() & {kind, kind + OUT} and count != used:
                leave = "" if self.preparation else f", or leave {kind!r} out of {KEY} placeholders"
                raise SampleError(
                    f"sample {name!r}: its row holds {count} of {kind!r} and its conversation has a place for {used}; "
                    f"name each in `content`{leave}"
                )
        return stored, name, messages, media

    def _text(self, name: str, content: Any, media: list[tuple[str, str | None]], role: str = "user") -> str:
        """The text of one turn; its media are appended to `media`."""
        text, kinds = "", (*KINDS, *DIMS)
        try:
            parts = list(parts_of(content, kinds, KINDS if self._store.in_order else ()))
        except ValueError as error:
            raise SampleError(f"sample {name!r}: {error}") from error
        for kind, value in parts:
            if kind == "text":
                assert isinstance(value, str)
                self._chat.check_text(name, value, by_template=self.preparation is not None)
                text += value
                continue
            if role == "assistant" and kind + OUT in self._made:
                text += self._made[kind + OUT].token
                media.append((kind + OUT, value))
                continue
            if kind not in self.placeholders:
                none = f"{KEY} placeholders has no token for that"
                reason = none if self.preparation is None else self.preparation.why_not(kind)
                reason += f"; {KEY} generated says what the assistant makes" if role == "assistant" else ""
                raise SampleError(f"sample {name!r}: it has {kind!r}, but {reason}")
            text += self._chat.texts[kind]
            media.append((kind, value))
        return text
