"""Chat templates: in which form one takes the content of a turn, a text or a list of parts, some of which are media;
and that it comes to an end.

Templates of multimodal models write tokens around an image (`<|vision_start|>`) in a branch for parts. Given one text
with the placeholder in it they silently leave these out. A template is a program that comes with data: transformers
lets it see nothing but its input, and here it is interrupted. What it may build in memory is not bounded.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from hetmesh.errors import RecipeError

Form = Callable[[str], Any]
"""From a turn's text, with placeholders where media are, to the content that a template gets."""

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""From turns of `role` and `content` to text; may raise anything."""

_MARKS = ("\ue010", "\ue011", "\ue012")

MAX_TRIAL_SECONDS = 5.0
"""Of computing, for all that is asked of a template before it is used."""


def parts_of(text: str, placeholders: Mapping[str, str]) -> list[dict[str, str]]:
    """A text as parts: `{"type": "image"}` where the placeholder of a kind is, `{"type": "text", "text": ...}` else."""
    kinds = {token: kind for kind, token in placeholders.items()}
    pieces = re.split("(" + "|".join(map(re.escape, sorted(kinds, key=len, reverse=True))) + ")", text)
    return [{"type": kinds[piece]} if piece in kinds else {"type": "text", "text": piece} for piece in pieces if piece]


def content_form(render: Render, placeholders: Mapping[str, str], key: str) -> Form:
    """The form in which a template is right: parts in every turn, parts in turns with media, or one text.

    Args:
        placeholders: kind of media -> its token.

    Raises:
        RecipeError: the template writes something for an item, but not the placeholder.
    """
    if not placeholders:
        return str

    parts = partial(parts_of, placeholders=placeholders)

    def parts_with_media(text: str) -> Any:
        split = parts(text)
        return split if any(part["type"] != "text" for part in split) else text

    other: dict[str, str] = {}
    for form in (parts, parts_with_media):
        written = {kind: _written(render, form, token) for kind, token in placeholders.items()}
        if any(text is None for text in written.values()):
            continue  # it does not know parts, or raises
        if all(str(written[kind]).count(token) == 1 for kind, token in placeholders.items()):
            return form
        other |= {kind: str(text) for kind, text in written.items() if text and placeholders[kind] not in str(text)}
    if other:
        kind, text = next(iter(other.items()))
        raise RecipeError(
            f"{key} placeholders: the chat template writes {text!r} for a part of type {kind!r}, not "
            f"{placeholders[kind]!r}; which tokens the model's processor makes of that, hetmesh does not know. Give a "
            "chat_template that writes the placeholder with the tokens around it"
        )
    return str


def broken_lines(render: Render, form: Form, placeholders: Mapping[str, str]) -> frozenset[str]:
    """Kinds of media after which a template itself begins a new line."""
    if form is str:
        return frozenset()
    return frozenset(k for k, token in placeholders.items() if (_written(render, form, token) or "").endswith("\n"))


def joins_texts(render: Render, form: Form) -> bool:
    """Whether a template writes two texts of a turn, one after the other, as the one text that they make."""
    user, after, said = _MARKS
    answer = {"role": "assistant", "content": form(said)}
    try:
        apart, joined = (
            render([{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}, answer])
            for texts in ((user, after), (user + after,))
        )
    except Exception:  # a template may raise anything: this one takes no parts
        return True
    return form is str or apart == joined


def left_out(render: Render, form: Form, placeholders: Mapping[str, str]) -> list[str]:
    """Kinds of media for which a template that takes parts writes nothing, so that texts hold the placeholder alone."""
    if form is not str:
        return []
    parts = partial(parts_of, placeholders=placeholders)
    return [kind for kind, token in placeholders.items() if _written(render, parts, token) == ""]


def check_replacements(
    render: Render, form: Form, placeholders: Mapping[str, str], replacements: Mapping[str, str], key: str
) -> None:
    """Check that a template writes for an item what is to be replaced.

    Args:
        render: the template, with its texts replaced.
        replacements: what it writes for an item -> what is in its place.

    Raises:
        RecipeError: what is in its place has no placeholder, or the template does not write it.
    """
    for before, text in replacements.items():
        inside = [token for token in placeholders.values() if token in text]
        if not inside:
            raise RecipeError(
                f"{key} replacements: {text!r}, for {before!r}, must hold one of the placeholders "
                f"{sorted(placeholders.values())}"
            )
        written = _written(render, form, inside[0])
        if written is None or text.strip() not in written:
            raise RecipeError(
                f"{key} replacements: the chat template does not write {before!r} for an item but {written!r}, so it "
                f"would not become {text!r}; give the chat_template of the model, or one that writes {before!r}"
            )


def _written(render: Render, form: Form, token: str) -> str | None:
    """What a template writes for one item in a turn; None where the texts around it do not come out as they are.

    Templates like LLaVA's write the items of a turn before all its texts.
    """
    user, after, said = _MARKS
    turns = [{"role": "user", "content": form(user + token + after)}, {"role": "assistant", "content": form(said)}]
    try:
        text = render(turns)
    except Exception:  # a template may raise anything
        return None
    if any(text.count(mark) != 1 for mark in _MARKS) or "'type'" in text or '"type"' in text:
        return None
    before, _, rest = text.partition(user)
    between, found, _ = rest.partition(after)
    if not found:
        return before + rest
    return before if token in before and token not in between else between


@contextmanager
def time_limit(template: str, key: str) -> Iterator[None]:
    """Interrupt the Python code of the body, which tries a template, after `MAX_TRIAL_SECONDS`. Every line of it looks
    at the clock, so it is several times as slow as otherwise. Raises RecipeError: it took longer, or could not be
    interrupted."""
    if _has_power(template):
        raise RecipeError(f"{key} chat_template: it has a power (**) in it, which may take for ever")
    stop = time.thread_time() + MAX_TRIAL_SECONDS

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if time.thread_time() > stop:
            raise _Late  # after which nothing is looked at any more
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    except _Late:
        raise RecipeError(f"{key} chat_template: it comes to no end within {MAX_TRIAL_SECONDS:g} s") from None
    finally:
        sys.settrace(before)


class _Late(BaseException):
    """No Exception: those that a template raises count as its refusals."""


def _has_power(template: str) -> bool:
    """Whether `**` stands between two values: one operation, in which nothing can be interrupted."""
    from jinja2 import Environment, TemplateError

    try:
        tokens = [text for _, kind, text in Environment().lex(template) if kind not in ("whitespace", "comment")]
    except TemplateError:  # which compiling it says better
        return False
    return any(after == "**" and before not in ("(", ",") for before, after in itertools.pairwise(tokens))
