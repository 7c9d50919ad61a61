"""A chat template is a program that comes with data. transformers keeps it from all but its input; here it comes to an
end. What it may build in memory is not bounded."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hetmesh.errors import RecipeError

SECONDS = 5.0
"""Of computing, for all that is asked of a template before it is used."""


@contextmanager
def ending(template: str, key: str) -> Iterator[None]:
    """Interrupt the Python code of the body, which tries a template, after `SECONDS`. Every line of it looks at the
    clock, so it is several times as slow as otherwise.

    Raises:
        RecipeError: it took longer, or could not be interrupted.
    """
    if _has_power(template):
        raise RecipeError(f"{key} chat_template: it has a power (**) in it, which may take for ever")
    stop = time.thread_time() + SECONDS

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if time.thread_time() > stop:
            raise _Late  # after which nothing is looked at any more
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    except _Late:
        raise RecipeError(f"{key} chat_template: it comes to no end within {SECONDS:g} s") from None
    finally:
        sys.settrace(before)


class _Late(BaseException):
    """No Exception: who tries a template takes these for its refusals."""


def _has_power(template: str) -> bool:
    """Whether `**` stands between two values: one operation, in which nothing can be interrupted."""
    from jinja2 import Environment, TemplateError

    try:
        tokens = [text for _, kind, text in Environment().lex(template) if kind not in ("whitespace", "comment")]
    except TemplateError:  # which compiling it says better
        return False
    return any(after == "**" and before not in ("(", ",") for before, after in itertools.pairwise(tokens))
