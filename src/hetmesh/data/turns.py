"""The turns of a conversation, from the forms that data sets have: OpenAI's messages, transformers' and LLaVA's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hetmesh.files import from_json

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Who speaks in `from`, and the role it is."""

MARKS = {"<image>": "image", "<video>": "video", "<audio>": "audio"}
"""What stands for media in the text of LLaVA's form."""

TENSOR = "tensor"
"""The type of a part of the assistant's turn that is a tensor."""

DATA_URL = "data:"

_TEXTS = ("text", "input_text", "output_text")
_KINDS = {form.format(kind): kind for kind in ("image", "video", "audio") for form in ("{}", "{}_url", "input_{}")}
"""A part's type -> the kind of its media."""

_NAMES = ("url", "path", "file", "data", "base64")
"""Keys under which a part, or the table in it, may have its media, besides its type and its kind."""

CALLS = ("tool_calls", "function_call")
"""Keys of a turn that call tools."""

_WEIGHTS, _MASKS = ("weight", "train"), ("loss", "mask", "loss_mask")
"""Keys by which data sets say which turns are targets; the first two are read."""

_READ = ("role", "content", "from", "value", *_WEIGHTS)
"""Keys of a turn that are read; the chat template gets the others."""


def turns_of(record: Mapping[str, Any], breaks: Collection[str] = ()) -> list[tuple[str, Any]]:
    """`(role, content)` of each turn of `messages`, or of `conversations` in LLaVA's form.

    A content is a text, or a list of parts `{"type": "text", "text": ...}`, `{"type": "image", "image": FILE}` and
    `{"type": "audio", "audio": FILE}`; the file may be a data URL. Where the record itself has `image`, `images`,
    `audio` or `audios` (`video`, `videos`), parts without a file and the marks `<image>`, `<audio>` and `<video>` in
    texts take them in order.

    After a mark of one of the kinds `breaks` the chat template begins a new line: the line break that LLaVA's form has
    there (`<image>\\n`) is that one. A turn that calls tools may have no content: None, or "". Raises KeyError,
    TypeError, ValueError: it has neither form, more files than places, or a mark in a message without any.
    """
    if twice := [kind for kind in MARKS.values() if record.get(kind) and record.get(f"{kind}s")]:
        raise ValueError(f"it has both {twice[0]!r} and '{twice[0]}s'; give all files in one of them")
    files = {kind: _Files(record, kind) for kind in MARKS.values()}
    if "messages" in record or "conversations" not in record:
        turns = [(str(turn["role"]), _content(_said(turn), files, breaks)) for turn in record["messages"]]
        turns = [("system" if role == "developer" else role, content) for role, content in turns]  # OpenAI's newer word
    else:
        turns = [(_speaker(turn["from"]), _parts(_text(turn), files, breaks)) for turn in record["conversations"]]
    named = {kind for kind, _ in media_of(turns)}
    if left := [kind for kind, some in files.items() if some.take() is not None and (some.used or kind not in named)]:
        raise ValueError(f"more files of {left} than marks in the text ({', '.join(MARKS)}) or parts")
    return turns


def check_unread(record: Mapping[str, Any], joins_texts: bool) -> None:
    """Raise ValueError for what a record says and its prompt would lack: a `system` beside the turns; two texts one
    after the other, which the chat template is given as one, unless it `joins_texts` too."""
    if beside := next((key for key in ("system", "system_prompt") if record.get(key)), None):
        raise ValueError(f"it has {beside!r} beside its turns, which is not read; write it as the first turn")
    for i, turn in enumerate(_turns(record) if not joins_texts else ()):
        parts = turn.get("content")
        kinds = [part.get("type") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        if any(kind in _TEXTS and after in _TEXTS for kind, after in pairwise(kinds)):
            raise ValueError(f"turn {i} has two texts in a row, between which the chat template writes more; join them")


@dataclass(frozen=True)
class Further:
    """What a record says besides the roles and contents of its turns.

    Attributes:
        keys: per turn, what the chat template gets besides (`tool_calls`, `reasoning_content`, `name`).
        tools: JSON schemas of the tools that there are, which it gets too.
        untrained: turns that are no targets.
        values: numbers for a custom loss, one for each turn.
    """

    keys: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] | None = None
    untrained: Collection[int] = ()
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)


NOTHING = Further()


def further_of(record: Mapping[str, Any], names: Collection[str] = ()) -> Further:
    """That of a record. Arguments of calls are objects, as templates take them, where OpenAI has their JSON text, and
    so are its `tools`.

    Args:
        names: of values. `weight` is that of the record times that of the turn, each 1 where it is absent; turns have
            the record's of all others.

    Raises:
        ValueError: one of these is malformed, or a weight is neither 0 nor 1 and not in `names`.
    """
    turns = _turns(record)
    keys = [
        {key: _objects(value) if key in CALLS else value for key, value in turn.items() if value and key not in _READ}
        | ({"content": None} if turn.get("content", "") is None else {})
        for turn in turns
    ]
    tools = _parsed(record.get("tools") or None, "tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"its `tools` must be a list of JSON schemas, got {tools!r:.80}")
    untrained = _untrained(record, "weight" in names)
    own = {name: _number(record, name) for name in names}
    values = {k: [v * (_number(turn, k) if k == "weight" else 1) for turn in turns] for k, v in own.items()}
    return Further(keys, tools, untrained, values)


_HONOURED = 'other weights are for a loss of your own that reads them: [data.options] values = ["weight"]'


def _untrained(record: Mapping[str, Any], weighted: bool) -> frozenset[int]:
    untrained: set[int] = set()
    for key in _WEIGHTS if not weighted else ("train",):
        if record.get(key) not in (None, 1, "1", "1.0"):  # of a CSV file they are texts
            raise ValueError(f"it has {key!r} = {record[key]!r} beside its turns, which is not read; {_HONOURED}")
    for i, turn in enumerate(_turns(record)):
        if masks := [key for key in _MASKS if turn.get(key) is not None]:
            raise ValueError(f"turn {i} has {masks[0]!r}, which is not read; give `weight` (0 or 1) or `train`")
        weights = {key: turn[key] for key in _WEIGHTS if turn.get(key) is not None}
        if any(value not in (0, 1) and not (weighted and key == "weight") for key, value in weights.items()):
            raise ValueError(f"turn {i} has {weights}: `weight` must be 0 or 1, `train` true or false; {_HONOURED}")
        speaker = turn.get("role", turn.get("from"))
        if ROLES.get(speaker) != "assistant" and any(weights.values()):
            raise ValueError(f"turn {i} has {weights}, but only the assistant's turns are targets, not {speaker!r}'s")
        if not all(weights.values()):
            untrained.add(i)
    return frozenset(untrained)


def _number(table: Mapping[str, Any], name: str) -> float:
    given = 1 if name == "weight" and table.get(name) is None else table.get(name)
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(number := float(given)):  # type: ignore[arg-type]
            return number
    raise ValueError(f"its {name!r}, which [data.options] values names, must be a number, got {given!r:.80}")


def _parsed(value: Any, what: str) -> Any:
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"its {what!r} are no JSON: {error}, got {value!r:.80}") from error


def _objects(calls: Any) -> Any:
    """Calls with their `arguments` as objects."""
    if isinstance(calls, list):
        return [_objects(call) for call in calls]
    if not isinstance(calls, Mapping):
        return calls
    whole = {"function": _objects, "arguments": lambda text: _parsed(text or "{}", "arguments")}
    return {key: whole[key](value) if key in whole else value for key, value in calls.items()}


def _said(turn: Mapping[str, Any]) -> Any:
    return turn.get("content") or "" if any(turn.get(key) for key in CALLS) else turn["content"]


def _text(turn: Mapping[str, Any]) -> str:
    text = turn["value"]
    if not isinstance(text, str):
        raise ValueError(f"`value` of a turn must be a text, got {text!r:.80}")
    return text


def _turns(record: Mapping[str, Any]) -> list[Any]:
    return record["messages" if "messages" in record or "conversations" not in record else "conversations"]


def media_of(turns: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Kind and file of the media in turns of `turns_of`, in order; None where a part names none."""
    for _, content in turns:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (kind := part.get("type")) in (*MARKS.values(), TENSOR):
                yield str(kind), part.get(kind)


def is_file_name(value: str) -> bool:
    """Whether a part's value names a file, and does not hold the bytes or an address."""
    return not value.startswith(DATA_URL) and "://" not in value


class _Files:
    """The files that a record names beside its turns."""

    def __init__(self, record: Mapping[str, Any], kind: str) -> None:
        value = next((record[key] for key in (kind, f"{kind}s") if record.get(key) is not None), None)
        self.given, self.used = value is not None, False
        self._rest: Iterator[Any] = iter(value if isinstance(value, list) else [] if value is None else [value])

    def take(self) -> Any:
        """The next one, None if there are no more."""
        return next(self._rest, None)


def _speaker(name: Any) -> str:
    if name not in ROLES:
        raise ValueError(f"`from` is {name!r}, must be one of {sorted(ROLES)}")
    return ROLES[name]


def _content(content: Any, files: Mapping[str, _Files], breaks: Collection[str]) -> Any:
    if isinstance(content, str):
        # where the placeholder is another token, the mark would be trained on as text, and its file be missed by nobody
        if alone := [mark for mark, kind in MARKS.items() if mark in content and not files[kind].given]:
            kind = MARKS[alone[0]]
            raise ValueError(
                f"its text contains {alone[0]!r}, which stands for media, and the record names no {kind}; give it "
                f"under {kind!r}, or as a part of type {kind!r}, or leave the mark out of the text"
            )
        marked = any(mark in content for mark in MARKS)
        return _parts(content, files, breaks) if marked else content
    if not isinstance(content, list):
        return content
    return [_part(part, files) if isinstance(part, dict) else part for part in content]


def _part(part: Mapping[str, Any], files: Mapping[str, _Files]) -> dict[str, Any]:
    """A part in our form; as it is where it has none that is known."""
    part = {k: v for k, v in part.items() if v is not None}  # a table gives every part all keys
    kind = part.get("type")
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    media = _KINDS.get(kind) if isinstance(kind, str) else None
    if media is None:
        return part
    inside = next((part[key] for key in (str(kind), f"{media}_url", media) if key in part), part)
    value = inside if not isinstance(inside, Mapping) else next((inside[n] for n in _NAMES if n in inside), None)
    if value is None and inside is part:
        value = files[media].take()
        files[media].used = True
        return {"type": media} if value is None else {"type": media, media: value}
    if isinstance(inside, Mapping) and isinstance(value, str) and ("data" in inside or "base64" in inside):
        form = inside.get("format", {"audio": "wav", "video": "mp4"}.get(media, "png"))
        value = value if value.startswith(DATA_URL) else f"{DATA_URL}{media}/{form};base64,{value}"
    return {"type": media, media: value}


def _parts(text: str, files: Mapping[str, _Files], breaks: Collection[str]) -> list[dict[str, Any]]:
    """The text between marks, and the media that the marks stand for."""
    parts: list[dict[str, Any]] = []
    while first := min(((at, mark) for mark in MARKS if (at := text.find(mark)) >= 0), default=None):
        at, mark = first
        kind = MARKS[mark]
        parts += [{"type": "text", "text": text[:at]}] if at else []
        name = files[kind].take()
        files[kind].used = True
        parts.append({"type": kind} if name is None else {"type": kind, kind: name})
        text = text[at + len(mark) :]
        text = text.removeprefix("\n") if kind in breaks else text
    return [*parts, {"type": "text", "text": text}] if text else parts
