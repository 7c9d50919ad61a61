"""In which form a chat template takes the content of a turn: one text, or a list of parts, some of which are media.

Templates of multimodal models write tokens around an image (`<|vision_start|>`) in a branch for parts. Given one text
with the placeholder in it they leave these out, without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetmesh.errors import RecipeError

Form = Callable[[str], Any]
"""From a turn's text, with placeholders where media are, to the content that a template gets."""

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""From turns of `role` and `content` to text; may raise anything."""

MARKS = ("\ue010", "\ue011", "\ue012")


def parts_of(text: str, placeholders: Mapping[str, str]) -> list[dict[str, str]]:
    """A text as parts: `{"type": "image"}` where the placeholder of a kind is, `{"type": "text", "text": ...}` else."""
    kinds = {token: kind for kind, token in placeholders.items()}
    found = re.split("(" + "|".join(map(re.escape, sorted(kinds, key=len, reverse=True))) + ")", text)
    return [{"type": kinds[each]} if each in kinds else {"type": "text", "text": each} for each in found if each]


def content_form(render: Render, placeholders: Mapping[str, str], key: str) -> Form:
    """The form in which a template is right: parts in every turn, parts in turns with media, or one text.

    Args:
        render: the template.
        placeholders: kind of media -> its token.
        key: prefix of recipe keys in errors.

    Raises:
        RecipeError: the template writes something for an item, but not the placeholder.
    """
    if not placeholders:
        return str

    def parts(text: str) -> Any:
        return parts_of(text, placeholders)

    def parts_with_media(text: str) -> Any:
        found = parts_of(text, placeholders)
        return found if any(part["type"] != "text" for part in found) else text

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
    """Kinds of media behind which a template itself begins a new line."""
    if form is str:
        return frozenset()
    return frozenset(k for k, token in placeholders.items() if (_written(render, form, token) or "").endswith("\n"))


def joins_texts(render: Render, form: Form) -> bool:
    """Whether a template writes two texts of a turn, one after the other, as the one text that they make."""
    user, behind, said = MARKS
    answer = {"role": "assistant", "content": form(said)}
    try:
        apart, joined = (
            render([{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}, answer])
            for texts in ((user, behind), (user + behind,))
        )
    except Exception:  # a template may raise anything: this one takes no parts
        return True
    return form is str or apart == joined


def left_out(render: Render, form: Form, placeholders: Mapping[str, str]) -> list[str]:
    """Kinds of media for which a template that takes parts writes nothing, so that texts hold the placeholder alone."""
    if form is not str:
        return []
    return [
        kind
        for kind, token in placeholders.items()
        if _written(render, lambda text: parts_of(text, placeholders), token) == ""
    ]


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
    user, behind, said = MARKS
    turns = [{"role": "user", "content": form(user + token + behind)}, {"role": "assistant", "content": form(said)}]
    try:
        text = render(turns)
    except Exception:  # a template may raise anything
        return None
    if any(text.count(mark) != 1 for mark in MARKS) or "'type'" in text or '"type"' in text:
        return None
    before, _, rest = text.partition(user)
    between, found, _ = rest.partition(behind)
    if not found:
        return before + rest
    return before if token in before and token not in between else between
