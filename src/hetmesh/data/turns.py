"""The turns of a conversation, from the forms in which data sets hold them: OpenAI's messages, transformers' and
LLaVA's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Who speaks in `from`, and the role it is."""

MARKS = {"<image>": "image", "<audio>": "audio"}
"""What stands for media in the text of LLaVA's form."""

DATA_URL = "data:"

_TEXTS = ("text", "input_text", "output_text")
_KINDS = {form.format(kind): kind for kind in ("image", "audio") for form in ("{}", "{}_url", "input_{}")}
"""A part's type -> the kind of its media."""

_NAMES = ("url", "path", "file", "data", "base64")
"""Keys under which a part, or the table in it, may have its media, besides its type and its kind."""

_CALLS = ("tools", "tool_calls", "function_call")
"""What requests to chat models have beside texts; chat templates would write it, and are not given it."""

_WEIGHTS, _MASKS = ("weight", "train"), ("loss", "mask", "loss_mask")
"""Keys by which data sets say which turns are targets; the first two are read."""

_READ = ("role", "content", "from", "value", *_WEIGHTS)
"""Keys of a turn that are read."""


def turns_of(record: Mapping[str, Any], breaks: Collection[str] = ()) -> list[tuple[str, Any]]:
    """`(role, content)` of each turn of `messages`, or of `conversations` in LLaVA's form.

    A content is a text, or a list of parts `{"type": "text", "text": ...}`, `{"type": "image", "image": FILE}` and
    `{"type": "audio", "audio": FILE}`; the file may be a data URL. Where the record itself has `image`, `images`,
    `audio` or `audios`, parts without a file and the marks `<image>` and `<audio>` in texts take them in order.

    After a mark of one of the kinds `breaks` the chat template begins a new line: the line break that LLaVA's form has
    there (`<image>\\n`) is that one, and not in the text too. Raises KeyError, TypeError, ValueError: it has neither
    form, or more files than places for them, or a mark in a message without any, or a video, or calls of tools.
    """
    if videos := [key for key in ("video", "videos") if record.get(key)]:
        raise ValueError(
            f"it has {videos[0]!r}, and videos are not read; leave the sample out, or give frames as images"
        )
    if calls := [key for table in (record, *_turns(record)) for key in _CALLS if table.get(key)]:
        raise ValueError(f"it has {calls[0]!r}, which are not given to the chat template; leave the sample out")
    if twice := [kind for kind in MARKS.values() if record.get(kind) and record.get(f"{kind}s")]:
        raise ValueError(f"it has both {twice[0]!r} and '{twice[0]}s'; give all files in one of them")
    files = {kind: _Files(record, kind) for kind in MARKS.values()}
    if "messages" in record or "conversations" not in record:
        turns = [(_role(turn["role"]), _content(turn["content"], files, breaks)) for turn in record["messages"]]
    else:
        turns = [(_speaker(turn["from"]), _parts(_text(turn), files, breaks)) for turn in record["conversations"]]
    named = {kind for kind, _ in media_of(turns)}
    if left := [kind for kind, some in files.items() if some.take() is not None and (some.used or kind not in named)]:
        raise ValueError(f"more files of {left} than marks in the text (<image>, <audio>) or parts")
    return turns


def untrained_turns(record: Mapping[str, Any]) -> frozenset[int]:
    """Which turns of a record are no targets by their `weight` (0 or 1) or `train` (true or false). Raises ValueError:
    another weight, or one that makes a target of what the assistant does not say."""
    untrained: set[int] = set()
    if ignored := [key for key in _WEIGHTS if record.get(key) is not None and not record[key]]:
        raise ValueError(f"it has {ignored[0]!r} beside its turns, which is not read; leave the sample out")
    for i, turn in enumerate(_turns(record)):
        if masks := [key for key in _MASKS if turn.get(key) is not None]:
            raise ValueError(f"turn {i} has {masks[0]!r}, which is not read; give `weight` (0 or 1) or `train`")
        weights = {key: turn[key] for key in _WEIGHTS if turn.get(key) is not None}
        if any(value not in (0, 1) for value in weights.values()):
            raise ValueError(f"turn {i} has {weights}: `weight` must be 0 or 1, `train` true or false")
        speaker = turn.get("role", turn.get("from"))
        if ROLES.get(speaker) != "assistant" and any(weights.values()):
            raise ValueError(f"turn {i} has {weights}, but only the assistant's turns are targets, not {speaker!r}'s")
        if not all(weights.values()):
            untrained.add(i)
    return frozenset(untrained)


def check_unread(record: Mapping[str, Any], joins_texts: bool) -> None:
    """Raise ValueError for what a record says and its prompt would lack: a `system` beside the turns; two texts one
    after the other, which the chat template is given as one, unless it `joins_texts` too."""
    if record.get("system") or record.get("system_prompt"):
        raise ValueError("it has 'system' beside its turns, which is not read; write it as the first turn")
    for i, turn in enumerate(_turns(record) if not joins_texts else ()):
        parts = turn.get("content")
        kinds = [part.get("type") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        if any(kind in _TEXTS and after in _TEXTS for kind, after in pairwise(kinds)):
            raise ValueError(f"turn {i} has two texts in a row, between which the chat template writes more; join them")


def unread_keys(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per turn, what it has beside its role, its content and its weight (`name`, `reasoning_content`, `id`)."""
    return [{key: value for key, value in turn.items() if value and key not in _READ} for turn in _turns(record)]


def _text(turn: Mapping[str, Any]) -> str:
    text = turn["value"]
    if not isinstance(text, str):
        raise ValueError(f"`value` of a turn must be a text, got {text!r:.80}")
    if "<video>" in text and turn["from"] in ("human", "user"):
        raise ValueError("its text contains '<video>', and videos are not read; leave the sample out")
    return text


def _turns(record: Mapping[str, Any]) -> list[Any]:
    return record["messages" if "messages" in record or "conversations" not in record else "conversations"]


def media_of(turns: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Kind and file of the media in turns of `turns_of`, in order; None where a part names none."""
    for _, content in turns:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (kind := part.get("type")) in MARKS.values():
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


def _role(name: Any) -> str:
    return "system" if name == "developer" else str(name)  # OpenAI's newer word for it


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
        form = inside.get("format", "wav" if media == "audio" else "png")
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
