"""Chat templates: in which form one takes the content of a turn, a text or a list of parts, some of which are media;
and that it comes to an end.

Templates of multimodal models write tokens around an image (`<|vision_start|>`) in a branch for parts. Given one text
with the placeholder in it they silently leave these out. A template is a program that comes with data: transformers
lets it see nothing but its input, and here it is interrupted. What it may build in memory is not bounded.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from hetmesh.data.turns import CALLS, ROLES, Further
from hetmesh.errors import RecipeError

Form = Callable[[str], Any]
"""From a turn's text, with placeholders where media are, to the content that a template gets."""

Turns = Sequence[Mapping[str, Any]]
"""As a template gets them."""

Render = Callable[[Turns], str]
"""From turns of `role` and `content` to text; may raise anything."""

Apply = Callable[..., str]
"""From turns, whether the assistant speaks next (`asks`), and `tools` to text; may raise anything."""

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
    `placeholders`: kind of media -> its token. Raises RecipeError: the template writes something for an item, but not
    the placeholder."""
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


THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn that hold a trace of reasoning."""


def check_written(apply: Apply, turns: Turns, further: Further, form: Form) -> None:
    """Raise ValueError for what of a conversation a template writes nothing of: calls, tools, what is said beside calls
    and by others than user and assistant, and reasoning, unless it only drops that of earlier answers."""
    if not (further.tools or any(further.keys) or any(turn["role"] not in ROLES.values() for turn in turns)):
        return
    whole, mark = apply(turns, tools=further.tools), _MARKS[0]

    def alike(others: Turns, tools: Any) -> bool:
        try:
            return apply(others, tools=tools) == whole
        except Exception:  # a template may raise anything: it has read what is missing
            return False

    ignored = ["'tools'"] if further.tools and alike(turns, None) else []
    for key in {key: None for keys in further.keys for key in keys if key in (*CALLS, *THOUGHTS)}:
        if alike([{k: v for k, v in turn.items() if k != key} for turn in turns], further.tools):
            last = [{"role": "user", "content": form("a")}, {"role": "assistant", "content": form("b"), key: mark}]
            ignored += [repr(key)] if key in CALLS or mark not in apply(last) else []
    for i, turn in enumerate(turns):
        if turn["role"] not in ROLES.values() or (turn["content"] and any(key in turn for key in CALLS)):
            others = [*turns[:i], {**turn, "content": form(mark)}, *turns[i + 1 :]]
            ignored += [f"what {turn['role']!r} says"] if alike(others, further.tools) else []
    if ignored:
        hint = "remove it from the data, or give a chat_template that writes it"
        raise ValueError(f"the chat template writes nothing of {ignored[0]}; {hint}")


def further_spans(
    apply: Apply, turns: Turns, further: Further, form: Form, end: Callable[[str], int]
) -> dict[int, tuple[int, int]]:
    """Where in the text those of the assistant's turns are of which the template writes more than their content, calls
    of tools or reasoning: `[start, stop)` from its generation prompt to the special token that ends the turn, found by
    what it writes of a plain answer in their place.

    Args:
        end: how many characters at the start of a text end a turn.

    Raises:
        ValueError: it writes something else around the plain answer, the next turn within this one, or refuses these.
    """
    more = [i for i, keys in enumerate(further.keys) if keys and turns[i]["role"] == "assistant"]
    text, mark, spans = apply(turns, tools=further.tools) if more else "", _MARKS[0], dict[int, tuple[int, int]]()

    def with_turn(i: int, turn: Mapping[str, Any]) -> str:
        return apply([*turns[:i], turn, *turns[i + 1 :]], tools=further.tools)

    for i in more:
        contents = form("") if turns[i]["content"] is None else turns[i]["content"], form(mark)
        try:
            bare, plain = (with_turn(i, {"role": "assistant", "content": said}) for said in contents)
            later = with_turn(i + 1, {**turns[i + 1], "content": form(mark)}).find(mark) if turns[i + 1 :] else -1
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"where answer {i} begins is not known: without {sorted(further.keys[i])} {error}"
            ) from error
        if bare == text:
            continue
        before, found, after = plain.partition(mark)
        start = max(len(os.path.commonprefix([before, text])), len(before.rstrip()))  # noqa: RUF071  (of characters)
        if (prompt := _generation_prompt(apply, form)) and prompt in before:
            start = before.rfind(prompt) + len(prompt)
        after = after[end(after) :]
        stop = len(text) - len(after)
        fits = text.startswith(before[:start]) and text.endswith(after) and start < stop and not 0 <= later < stop
        if not found or not fits:
            keys = sorted(further.keys[i])
            raise ValueError(f"where answer {i} is, is not known: {keys} change what is written around it")
        spans[i] = start, stop
    return spans


def _generation_prompt(apply: Apply, form: Form) -> str:
    try:
        asked, plain = (apply([{"role": "user", "content": form("a")}], asks) for asks in (True, False))
    except Exception:  # a template may ask more of a conversation
        return ""
    return asked.removeprefix(plain)


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
    """Interrupt the Python code of the body, which tries a template, after `MAX_TRIAL_SECONDS`; it is several times as
    slow, as every line looks at the clock. Raises RecipeError: it took longer, or could not be interrupted."""
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
