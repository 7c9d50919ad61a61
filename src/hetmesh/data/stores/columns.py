"""From a record to a conversation: which of its columns (keys of JSON, columns of a table) hold what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hetmesh.data.stores.store import Record
from hetmesh.data.turns import MARKS
from hetmesh.errors import RecipeError, SampleError
from hetmesh.files import from_json

USUAL: Mapping[str, tuple[str, ...]] = {
    "id": ("id",),
    "image": ("image", "images", "file_name"),
    "video": ("video", "videos"),
    "audio": ("audio", "audios"),
    "messages": ("messages", "conversations"),
    "texts": ("texts",),
    "question": ("question",),
    "answer": ("answer", "multiple_choice_answer", "answers"),
    "text": ("text", "caption"),
}
"""What columns hold -> the column, unless the recipe says: of these names the first that there is."""

FORMS = (("messages",), ("texts",), ("question", "answer"), ("text",))
"""What a conversation is made of; of these the first that a record has."""

BESIDE = ("tools", "system", "system_prompt", "weight", "train")
"""Further columns that a conversation may have."""

MEDIA = tuple(MARKS.values())


class Columns:
    """What the columns of records hold: `named`, from what (a key of `USUAL`) to its column; `prompt` is what the user
    says of captioned media, `values` are further columns. Raises RecipeError: it names something else."""

    def __init__(self, named: Mapping[str, str] | None = None, prompt: str = "", values: Collection[str] = ()) -> None:
        self.named, self.prompt, self.kept = dict(named or {}), prompt, (*BESIDE, *values)
        self.notes: list[str] = []
        """Of what the first record was made that holds no turns, or more than these."""
        if unknown := sorted(set(self.named) - set(USUAL)):
            raise RecipeError(f"[data.options] columns: unknown {unknown}; valid are {list(USUAL)}")

    def of(self, names: Collection[str]) -> dict[str, str]:
        """What -> its column, for a record that has the columns `names`. Raises ValueError: the recipe names another
        one, or they make no conversation."""
        if gone := [column for column in self.named.values() if column not in names]:
            raise ValueError(f"[data.options] columns names {gone[0]!r}, which is not among {sorted(names)}")
        free = [name for name in names if name not in self.named.values()]
        found = {what: next((c for c in usual if c in free), "") for what, usual in USUAL.items()} | self.named
        forms = [form for form in FORMS if self.named.keys() & {*form}] or FORMS
        form = next((form for form in forms if all(found[what] for what in form)), None)
        if form is None:
            raise ValueError(
                f"needs one of {', '.join(' + '.join(form) for form in FORMS)}, it has {sorted(names)}; [data.options] "
                "columns says which column is what"
            )
        return {what: column for what, column in found.items() if column and what in ("id", *MEDIA, *form)}

    def note(self, names: Collection[str], found: Mapping[str, str]) -> None:
        """Remember what is made of the columns `names`, unless it is known, or they hold turns and all are read."""
        left = sorted({*names}.difference(found.values(), self.kept))
        if not self.notes and (left or "messages" not in found):
            shown = ", ".join(f"{what} = {column!r}" for what, column in found.items())
            unread = ", ".join(left) or "none"
            self.notes.append(f"samples are made of the columns {shown}; columns that are not read: {unread}")

    def takes_caption(self, record: Mapping[str, Any]) -> bool:
        """Whether a caption that is stored beside `record` is what the assistant says: it makes no conversation itself,
        and the recipe names no text in it. Raises ValueError: see `of`."""
        return "text" not in self.named and "text" in self.of({*record, "text"})

    def record(
        self,
        name: str,
        value: Any,
        size: int,
        others: tuple[str, ...] = (),
        *,
        inside: Mapping[str, int] | None = None,
        beside: Callable[[], Mapping[str, list[str]]] | None = None,
        where: str = "",
    ) -> Record:
        """A stored record as `turns_of` takes it: media come first in what the user says, unless the text has marks.

        Args:
            inside: how many media items of each kind the row of a table holds.
            beside: gives files of media, where the record names none.
            where: in which file it is, for errors.

        Raises:
            SampleError: it makes no conversation.
        """
        try:
            return Record(name, self._conversation(value, inside, beside), size, others)
        except ValueError as error:
            raise SampleError(f"sample {name!r}{where}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise SampleError(f"sample {name!r}{where}: must be an object with `messages`: {error!r}") from error

    def _conversation(
        self, record: Any, inside: Mapping[str, int] | None, beside: Callable[[], Mapping[str, list[str]]] | None
    ) -> Any:
        if not isinstance(record, Mapping):
            raise ValueError(f"must be an object with `messages`, got {record!r:.80}")
        found = self.of(record.keys())
        given = {what: record[column] for what, column in found.items()}
        turns = given.get("messages")
        if turns is not None and not self.named and inside is None and not isinstance(turns, str):
            self.note(record.keys(), found)
            return record
        items = {kind: given.get(kind) or [] for kind in MEDIA}
        media: Mapping[str, list[Any]] = {k: item if isinstance(item, list) else [item] for k, item in items.items()}
        if inside is not None:
            media = {kind: [None] * count for kind, count in inside.items()}
        elif "messages" not in found and not any(media.values()) and beside is not None:
            media = beside()
        out = {key: value for key, value in record.items() if key not in found.values()}
        out |= {kind: items for kind, items in media.items() if items}
        out |= {"id": given["id"]} if "id" in given else {}
        if "messages" in found:
            self.note(record.keys(), found)
            turns = from_json(turns) if isinstance(turns, str) else turns
            return out | {"conversations" if turns and "from" in turns[0] else "messages": turns}
        asks_of_none = self.prompt and beside is None and not any(kind in found for kind in MEDIA)
        if "text" in found and not any(media.values()) and not asks_of_none:
            raise ValueError(f"its caption {found['text']!r} is of nothing: it has no media, only {sorted(record)}")
        self.note(record.keys(), found)
        if "texts" in found:
            pairs = [(turn["user"], turn["assistant"]) for turn in given["texts"]]
        elif "question" in found:
            pairs = [(given["question"], _answer(given["answer"]))]
        else:
            pairs = [(self.prompt, given["text"])]
        if wrong := [text for pair in pairs for text in pair if not isinstance(text, str)]:
            raise ValueError(f"a question, answer or caption must be a text, got {wrong[0]!r:.80}")
        out["messages"] = []
        parts = [{"type": kind} for kind, items in media.items() for _ in items]
        marked = any(mark in asked for asked, _ in pairs for mark in MARKS)
        for i, (asked, said) in enumerate(pairs):
            words = [{"type": "text", "text": asked}] if asked else []
            content = asked if marked else [*(parts if i == 0 else ()), *words]
            out["messages"].append({"role": "user", "content": content})
            out["messages"].append({"role": "assistant", "content": [{"type": "text", "text": said}]})
        return out


def _answer(value: Any) -> Any:
    """The answer, or of several the most frequent one (the first of these): texts, numbers, or as `{answer: ...}`."""
    if isinstance(value, Mapping):  # as Hugging Face datasets stores a list of tables
        value = value.get("answer")
    if isinstance(value, list):
        given = [item.get("answer") if isinstance(item, Mapping) else item for item in value]
        value = Counter(given).most_common(1)[0][0] if given else None
    return str(value) if isinstance(value, int | float) else value
