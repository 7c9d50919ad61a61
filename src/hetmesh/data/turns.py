"""The turns of a conversation, from the two forms in which data sets hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Who speaks in `from`, and the role it is."""

MARKS = {"<image>": "image", "<audio>": "audio"}
"""What stands for media in the text of LLaVA's form."""


def turns_of(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """`(role, content)` of each turn of `messages`, or of `conversations` in LLaVA's form, whose `<image>` takes the
    files of `image` in order.

    Raises:
        KeyError, TypeError, ValueError: it has neither form.
    """
    if "messages" in record or "conversations" not in record:
        return [(str(turn["role"]), _content(turn["content"])) for turn in record["messages"]]
    files = {kind: iter(_listed(record.get(kind))) for kind in MARKS.values()}
    turns: list[tuple[str, Any]] = []
    for turn in record["conversations"]:
        if turn["from"] not in ROLES:
            raise ValueError(f"`from` is {turn['from']!r}, must be one of {sorted(ROLES)}")
        turns.append((ROLES[turn["from"]], _parts(str(turn["value"]), files)))
    left = [kind for kind, each in files.items() if next(each, None) is not None]
    if left:
        raise ValueError(f"more files of {left} than marks in the text")
    return turns


def _content(content: Any) -> Any:
    """A table gives every part all keys, most of them null."""
    if not isinstance(content, list):
        return content
    return [{k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part for part in content]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _parts(text: str, files: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The text between marks, and the media that the marks stand for."""
    parts: list[dict[str, Any]] = []
    while found := min(((at, mark) for mark in MARKS if (at := text.find(mark)) >= 0), default=None):
        at, mark = found
        kind = MARKS[mark]
        parts += [{"type": "text", "text": text[:at]}] if at else []
        name = next(files[kind], None)
        parts.append({"type": kind} if name is None else {"type": kind, kind: name})
        text = text[at + len(mark) :]
    return [*parts, {"type": "text", "text": text}] if text else parts
