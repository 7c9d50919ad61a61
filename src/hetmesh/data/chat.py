"""Conversations as tokens: a tokenizer's chat template, and which tokens are the assistant's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hetmesh.data.chat_template import (
    broken_lines,
    check_written,
    content_form,
    further_spans,
    joins_texts,
    left_out,
    time_limit,
)
from hetmesh.data.generated import OUT, Generated
from hetmesh.data.turns import NOTHING, Further
from hetmesh.errors import RecipeError, SampleError

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }} "
    "{% elif m['role'] == 'user' %}USER: {{ m['content'] }} "
    "{% elif m['role'] == 'assistant' %}ASSISTANT: {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('there is no role ' + m['role'] + ', only system, user and assistant') }}"
    "{% endif %}{% endfor %}"
)
"""For tokenizers without a chat template: Vicuna's form, which LLaVA uses."""

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Encoded:
    """A conversation's token ids, `[start, stop)` spans of what the assistant says, and the turn of each of these."""

    ids: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]
    turns: tuple[int, ...] = ()


class Chat:
    """A tokenizer with its chat template.

    Args:
        folder: a Hugging Face directory with a fast tokenizer, none of whose code is run.
        placeholders: kind of media -> the token of the vocabulary that stands for one item of it.
        template: a chat template (Jinja) instead of the tokenizer's own.
        key: prefix of the recipe keys in errors.
        generated: kinds that the assistant makes, whose tokens a template gets as text.

    Raises:
        RecipeError: there is no such tokenizer, or a placeholder is not one token, or has another meaning.
    """

    def __init__(
        self,
        folder: Path,
        placeholders: Mapping[str, str],
        template: str | None = None,
        key: str = "[data.options]",
        generated: Mapping[str, Generated] = MappingProxyType({}),
    ) -> None:
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in FILES):  # transformers may make an empty one instead
            raise RecipeError(f"{key} tokenizer = '{folder}': there is no tokenizer in it (none of {', '.join(FILES)})")
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a broken directory leads to
            raise RecipeError(f"{key} tokenizer = '{folder}': {' '.join(str(error).split())}") from error
        if not tokenizer.is_fast:
            raise RecipeError(
                f"{key} tokenizer = '{folder}': {type(tokenizer).__name__} does not say which characters a token "
                "stands for; convert it to a fast one (a tokenizer.json)"
            )
        self.tokenizer = tokenizer
        stored = tokenizer.chat_template  # or several by name
        default = stored.get("default") if isinstance(stored, Mapping) else stored
        self.template = template or default or DEFAULT_TEMPLATE
        self.vocab_size = len(tokenizer)
        self._special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._special |= set(tokenizer.all_special_tokens)
        self.texts = dict(placeholders)
        made = {kind: item.token for kind, item in generated.items()}
        read_key, made_key = f"{key} placeholders", f"{key} generated"
        self.placeholders = {kind: self._placeholder(kind, text, read_key) for kind, text in placeholders.items()}
        self.generated = {kind: self._placeholder(kind, text, made_key) for kind, text in made.items()}
        self._fixed = frozenset({*self.placeholders.values(), *self.generated.values()})
        if len(self._fixed) < len(placeholders) + len(made):
            where, given = made_key if made else read_key, {**self.texts, **made}
            raise RecipeError(f"{where} = {given}: each kind of media needs a token of its own")
        meanings = {getattr(tokenizer, f"{name}_token"): name for name in ("pad", "eos", "bos", "unk")}
        if taken := [text for text in made.values() if text in meanings]:
            raise RecipeError(
                f"{made_key}: {taken[0]!r} is the tokenizer's {meanings[taken[0]]}_token; take a special token "
                f"without another meaning. It has {sorted(self._special)[:16]}"
            )
        self.reserved = frozenset({*self.texts.values(), *made.values()})
        with time_limit(self.template, key):
            self._form = content_form(self._apply, self.texts, key)
            self.breaks = broken_lines(self._apply, self._form, self.texts)
            self.joins_texts = joins_texts(self._apply, self._form)
            with contextlib.suppress(SampleError):  # it may want more of a conversation
                self._render("", [("user", "a"), ("assistant", "b")])
        fillers = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, *range(self.vocab_size))
        # Padding is never looked at, so any token but a placeholder will do.
        self.pad_id = next(i for i in fillers if i is not None and i not in self._fixed)

    def _placeholder(self, kind: str, text: str, key: str) -> int:
        token = self.tokenizer.convert_tokens_to_ids(text)
        unknown = token is None or (token == self.tokenizer.unk_token_id and text != self.tokenizer.unk_token)
        if unknown or self.tokenizer(text, add_special_tokens=False)["input_ids"] != [token]:
            raise RecipeError(
                f"{key}: {text!r} (for {kind!r}) is not one token of the vocabulary; take a special token "
                f"that texts do not use. It has {sorted(self._special)[:16]}"
            )
        return token

    def breaks_of(self, role: str) -> frozenset[str]:
        """Kinds of media after which the template begins a new line: in the assistant's turns those that are read."""
        return self.breaks - {kind.removesuffix(OUT) for kind in self.generated if role == "assistant"}

    @property
    def takes_parts(self) -> bool:
        """Whether the template takes media as parts of a turn, not as tokens in its text."""
        return self._form is not str

    def encode(self, sample_id: str, messages: Sequence[tuple[str, str]], further: Further = NOTHING) -> Encoded:
        """The tokens of a conversation of `(role, text)` turns.

        Targets are the assistant's words, calls of tools and reasoning as the template writes them, and the special
        token that ends its turn; a token that begins in the text before counts too. Never the first token, and no
        placeholder. Raises SampleError: the template fails, or changes what the assistant says."""
        text, spans = self.text_and_spans(sample_id, messages, further)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = tuple(encoding["input_ids"])
        turns = [
            next((turn for a, b, turn in spans if a < stop and start < b), None)
            if i > 0 and token not in self._fixed and start < stop
            else None
            for i, (token, (start, stop)) in enumerate(zip(ids, encoding["offset_mapping"], strict=True))
        ]
        return Encoded(ids, runs_of([turn is not None for turn in turns]), tuple(t for t in turns if t is not None))

    def text_and_spans(
        self, sample_id: str, messages: Sequence[tuple[str, str]], further: Further = NOTHING
    ) -> tuple[str, tuple[tuple[int, int, int], ...]]:
        """What the template writes, and the characters `(start, stop, turn)` of it that are targets; see `encode`."""
        marks = [f"\ue000{i}\ue001" for i in range(len(messages))]
        text = self._render(sample_id, messages, further=further)
        found = self._ask(sample_id, partial(further_spans, end=self._end), messages, further)
        answers = [i for i, (role, _) in enumerate(messages) if role == "assistant" and i not in found]
        marked = [(role, marks[i] if i in answers else said) for i, (role, said) in enumerate(messages)]
        plain = self._render(sample_id, marked, further=further)
        spans = self._spans(sample_id, text, plain, [(marks[i], messages[i][1]) for i in answers])
        found |= zip(answers, spans, strict=True)
        return text, tuple((*found[i], i) for i in sorted(found) if i not in further.untrained)

    def prompt(self, sample_id: str, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The tokens of a conversation up to where the assistant speaks next; see `prompt_text`."""
        text = self.prompt_text(sample_id, messages)
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt_text(self, sample_id: str, messages: Sequence[tuple[str, str]]) -> str:
        """The text of a conversation up to where the assistant speaks next.

        It ends with the template's own generation prompt, where that comes before what the assistant says too; else
        with what does, without spaces at the end, which belong to the next word. Raises SampleError."""
        before, asked = self._asked(sample_id, messages)
        return asked or before.rstrip(" ")

    def _asked(self, sample_id: str, messages: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """What comes before what the assistant says, and the generation prompt that it begins with; "" without one."""
        mark = "\ue000"
        before, found, _ = self._render(sample_id, [*messages, ("assistant", mark)]).partition(mark)
        if not found:
            raise SampleError(f"sample {sample_id!r}: the chat template does not give the assistant's turn")
        asked, plain = self._render(sample_id, messages, asks=True), self._render(sample_id, messages)
        return before, asked if before.startswith(asked) and len(asked) > len(plain) else ""

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's EOS, and the special token that ends the assistant's turn."""
        ends = (self.tokenizer.eos_token_id, self._turn_end)
        return tuple(dict.fromkeys(token for token in ends if token is not None))

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody who trains with this template should know."""
        notes = [
            f"the chat template writes nothing for a part of type {kind!r}: texts have {self.texts[kind]!r} in its "
            "place, without any tokens around it that the model may know"
            for kind in left_out(self._apply, self._form, self.texts)
        ]
        if not self._ends_turns():
            eos = self.tokenizer.eos_token or "the token that ends one"
            notes.append(
                "the chat template ends an answer without a special token: the model does not learn to stop; a "
                f"chat_template in [data.options] that writes {eos} after the assistant's turn teaches it"
            )
        with contextlib.suppress(SampleError):
            before, asked = self._asked("", [("user", "a")])
            if asked and (between := before.removeprefix(asked)).strip():
                notes.append(
                    f"the chat template writes {between!r} between its generation prompt and an answer: it is no "
                    "target, and whoever generates from that prompt has the model write what it was not taught"
                )
        return tuple(notes)

    def _ends_turns(self) -> bool:
        try:
            return self._turn_end is not None
        except SampleError:  # the template asks more of a conversation; its errors are about the data
            return True

    @cached_property
    def _turn_end(self) -> int | None:
        """The special token that ends the assistant's turn, None if the template writes none."""
        encoded = self.encode("the end of a turn", [("user", "a"), ("assistant", "b")])
        last = encoded.ids[encoded.targets[-1][1] - 1] if encoded.targets else None
        if last is None or last == self.tokenizer.unk_token_id:  # small vocabularies have no "b"
            return None
        return last if self.tokenizer.convert_ids_to_tokens(last) in self._special else None

    def turns(self, messages: Sequence[tuple[str, str]], further: Further = NOTHING) -> list[dict[str, Any]]:
        """Messages in the form in which the template takes them."""
        keys = further.keys or [{}] * len(messages)
        pairs = zip(messages, keys, strict=True)
        return [{"role": role, "content": self._form(text), **more} for (role, text), more in pairs]

    def check_written(self, sample_id: str, messages: Sequence[tuple[str, str]], further: Further) -> None:
        """Raise SampleError where the template fails, or leaves something out (`chat_template.check_written`)."""
        self._ask(sample_id, check_written, messages, further)

    def check_text(self, sample_id: str, text: str, *, by_template: bool) -> None:
        """Raise SampleError where a text holds what stands for media. `by_template`: the model's template says what."""
        if used := sorted(piece for piece in self.reserved if piece in text):
            other = "leave it out of the text" if by_template else "choose another placeholder"
            raise SampleError(
                f"sample {sample_id!r}: its text contains {used[0]!r}, which stands for media; write media as parts of "
                f"`content`, or {other}"
            )

    def _ask(
        self, sample_id: str, function: Callable[..., Any], messages: Sequence[tuple[str, str]], further: Further
    ) -> Any:
        try:
            return function(self._apply, self.turns(messages, further), further, self._form)
        except ValueError as error:
            raise SampleError(f"sample {sample_id!r}: {error}") from error
        except Exception as error:  # a template may raise anything
            raise SampleError(f"sample {sample_id!r}: the chat template refuses it: {error}") from error

    def _render(
        self, sample_id: str, messages: Sequence[tuple[str, str]], asks: bool = False, further: Further = NOTHING
    ) -> str:
        try:
            return self._apply(self.turns(messages, further), asks, further.tools)
        except Exception as error:  # a template may raise anything
            raise SampleError(f"sample {sample_id!r}: the chat template refuses it: {error}") from error

    def _apply(self, turns: Sequence[Mapping[str, Any]], asks: bool = False, tools: Any = None) -> str:
        options = {"chat_template": self.template, "tokenize": False, "add_generation_prompt": asks, "tools": tools}
        return self.tokenizer.apply_chat_template(turns, **options)

    def _spans(self, sample_id: str, text: str, marked: str, turns: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
        """Where in `text` the assistant's turns are, given the same with a mark in place of each."""
        between, rest = [], marked
        for mark, _ in turns:
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise SampleError(
                    f"sample {sample_id!r}: the chat template must give each of the assistant's turns once, in order"
                )
            between.append(before)
        between.append(rest)
        changes: tuple[Callable[[str], str], ...] = (str, str.strip, str.lstrip, str.rstrip)
        for change in changes:  # templates trim, or do not
            said = [change(turn) for _, turn in turns]
            if "".join(a + b for a, b in zip(between, [*said, ""], strict=True)) == text:
                break
        else:
            holds = any(token in turn for token in self.texts.values() for _, turn in turns)
            move = (
                ", which holds media: move these into the user's turn, or see [data.options] generated" if holds else ""
            )
            raise SampleError(f"sample {sample_id!r}: the chat template changes what the assistant says{move}")
        spans, position = [], 0
        for before, turn, after in zip(between, said, between[1:], strict=False):
            start = position + len(before)
            position = start + len(turn)
            spans.append((start, position + self._end(after)))
        return spans

    def _end(self, after: str) -> int:
        """Characters of the special token that ends a turn, at the start of what follows it; 0 without one."""
        blank = len(after) - len(after.lstrip())
        ends = [len(s) for s in self._special if s and after.startswith(s, blank)]
        return blank + max(ends) if ends else 0


def runs_of(chosen: Sequence[bool] | np.ndarray) -> tuple[tuple[int, int], ...]:
    """`[start, stop)` of the runs of True."""
    among = np.zeros(len(chosen) + 2, bool)
    among[1:-1] = chosen
    edges = np.flatnonzero(among[1:] != among[:-1]).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))
