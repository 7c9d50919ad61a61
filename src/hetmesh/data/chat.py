"""Conversations as tokens: a tokenizer's chat template, and which tokens are the assistant's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hetmesh.data.chat_template import broken_lines, check_replacements, content_form, joins_texts, left_out, time_limit
from hetmesh.data.turns import unread_keys
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
    """A conversation as tokens: their ids, and the `[start, stop)` spans of those that the assistant says."""

    ids: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]


class Chat:
    """A tokenizer with its chat template.

    Args:
        folder: a Hugging Face directory with a fast tokenizer, none of whose code is run.
        placeholders: kind of media -> the token of the vocabulary that stands for one item of it.
        template: a chat template (Jinja) instead of the tokenizer's own.
        replacements: what the template writes for an item -> what is put in its place, as a model's processor does.
        special_tokens: let the tokenizer add its own (a BOS) to a text that does not begin with one, as processors do.
        key: prefix of the recipe keys in errors.

    Raises:
        RecipeError: there is no such tokenizer, a placeholder is not one token, or the template does not write
            what is to be replaced.
    """

    def __init__(
        self,
        folder: Path,
        placeholders: Mapping[str, str],
        template: str | None = None,
        key: str = "[data.options]",
        *,
        replacements: Mapping[str, str] | None = None,
        special_tokens: bool = False,
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
        self.placeholders = {kind: self._placeholder(kind, text, key) for kind, text in placeholders.items()}
        if len(set(self.placeholders.values())) < len(self.placeholders):
            raise RecipeError(f"{key} placeholders = {self.texts}: each kind of media needs a token of its own")
        self._replacements, self._adds = dict(replacements or {}), special_tokens
        self.reserved = frozenset((*self.texts.values(), *self._replacements))
        with time_limit(self.template, key):
            self._form = content_form(self._apply, self.texts, key)
            self.breaks = broken_lines(self._apply, self._form, self.texts)
            """Kinds of media after which the template begins a new line."""
            self.joins_texts = joins_texts(self._apply, self._form)
            check_replacements(self._apply, self._form, self.texts, self._replacements, key)
            with contextlib.suppress(SampleError):  # it may want more of a conversation
                self._render("", [("user", "a"), ("assistant", "b")])
        fillers = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, *range(self.vocab_size))
        self._backend = _backend_of(tokenizer, list(placeholders.values()), special_tokens)
        # Padding is never looked at, so any token but a placeholder will do.
        self.pad_id = next(i for i in fillers if i is not None and i not in self.placeholders.values())

    def _placeholder(self, kind: str, text: str, key: str) -> int:
        token = self.tokenizer.convert_tokens_to_ids(text)
        unknown = token is None or (token == self.tokenizer.unk_token_id and text != self.tokenizer.unk_token)
        if unknown or self.tokenizer(text, add_special_tokens=False)["input_ids"] != [token]:
            raise RecipeError(
                f"{key} placeholders: {text!r} (for {kind!r}) is not one token of the vocabulary; take a special token "
                f"that texts do not use. It has {sorted(self._special)[:16]}"
            )
        return token

    def encode(self, sample_id: str, messages: Sequence[tuple[str, str]], untrained: Collection[int] = ()) -> Encoded:
        """The tokens of a conversation of `(role, text)` turns; those of the turns `untrained` are no targets.

        Targets are the assistant's words and the special token that ends its turn; a token that begins in the text
        before counts too. Never the first token, and no placeholder. Raises SampleError: the template fails, or changes
        what the assistant says."""
        marks = [f"\ue000{i}\ue001" for i in range(len(messages))]
        answers = [i for i, (role, _) in enumerate(messages) if role == "assistant"]
        text = self._render(sample_id, messages)
        marked = [(role, marks[i] if role == "assistant" else said) for i, (role, said) in enumerate(messages)]
        spans = self._spans(
            sample_id, text, self._render(sample_id, marked), [(marks[i], messages[i][1]) for i in answers]
        )
        spans = [span for i, span in zip(answers, spans, strict=True) if i not in untrained]
        encoding = self.tokenizer(text, add_special_tokens=self._adds_to(text), return_offsets_mapping=True)
        ids = tuple(encoding["input_ids"])
        fixed = set(self.placeholders.values())
        chosen = [
            i > 0 and token not in fixed and start < stop and any(a < stop and start < b for a, b in spans)
            for i, (token, (start, stop)) in enumerate(zip(ids, encoding["offset_mapping"], strict=True))
        ]
        return Encoded(ids, _runs(chosen))

    def ids(self, sample_id: str, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The tokens of `encode` alone, in half the time. Raises SampleError: the template fails."""
        text = self._render(sample_id, messages)
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=self._adds_to(text)).ids)
        return tuple(self.tokenizer(text, add_special_tokens=self._adds_to(text))["input_ids"])

    def prompt(self, sample_id: str, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The tokens of a conversation up to where the assistant speaks next.

        They end with the template's own generation prompt, where `encode` has that before what the assistant says too;
        else with what it has there, without spaces at the end, which tokenizers give to the word that follows. Raises
        SampleError: the template fails."""
        mark = "\ue000"
        before, found, _ = self._render(sample_id, [*messages, ("assistant", mark)]).partition(mark)
        if not found:
            raise SampleError(f"sample {sample_id!r}: the chat template does not give the assistant's turn")
        asked, plain = self._render(sample_id, messages, asks=True), self._render(sample_id, messages)
        text = asked if before.startswith(asked) and len(asked) > len(plain) else before.rstrip(" ")
        return tuple(self.tokenizer(text, add_special_tokens=self._adds_to(text))["input_ids"])

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
        if (between := self._before_answers()).strip():
            notes.append(
                f"the chat template writes {between!r} between its generation prompt and an answer: it is no target, "
                "and whoever generates from that prompt has the model write what it was not taught"
            )
        return tuple(notes)

    def _before_answers(self) -> str:
        """What stands between the generation prompt and what the assistant says."""
        mark, asking = "\ue000", [("user", "a")]
        try:
            before, _, _ = self._render("", [*asking, ("assistant", mark)]).partition(mark)
            asked, plain = self._render("", asking, asks=True), self._render("", asking)
        except SampleError:
            return ""
        return before.removeprefix(asked) if before.startswith(asked) and len(asked) > len(plain) else ""

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

    def _adds_to(self, text: str) -> bool:
        """Whether the tokenizer adds its special tokens to a text."""
        return self._adds and not (self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token))

    def turns(self, messages: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Messages in the form in which the template takes them."""
        return [{"role": role, "content": self._form(text)} for role, text in messages]

    def check_unread(self, sample_id: str, messages: Sequence[tuple[str, str]], record: Mapping[str, Any]) -> None:
        """Check that the template writes the same when it gets all keys of the turns of `record`, of which `messages`
        have roles and contents alone. Raises SampleError: it writes something else, or fails."""
        unread = unread_keys(record)
        turns = self.turns(messages) if any(unread) else []
        for key in dict.fromkeys(key for keys in unread for key in keys):
            pairs = zip(turns, unread, strict=True)
            complete = [{**turn, **({key: keys[key]} if key in keys else {})} for turn, keys in pairs]
            try:
                reads = self._apply(complete) != self._render(sample_id, messages)
            except SampleError:
                raise
            except Exception:  # a template may raise anything
                reads = True
            if reads:
                raise SampleError(
                    f"sample {sample_id!r}: the chat template reads {key!r} of a turn, which it is not given; "
                    "leave the sample out"
                )

    def _render(self, sample_id: str, messages: Sequence[tuple[str, str]], asks: bool = False) -> str:
        try:
            return self._apply(self.turns(messages), asks)
        except Exception as error:  # a template may raise anything
            raise SampleError(f"sample {sample_id!r}: the chat template refuses it: {error}") from error

    def _apply(self, turns: Sequence[Mapping[str, Any]], asks: bool = False) -> str:
        options = {"chat_template": self.template, "tokenize": False, "add_generation_prompt": asks}
        text = self.tokenizer.apply_chat_template(turns, **options)
        if not self._replacements:
            return text
        pattern = "|".join(map(re.escape, self._replacements))
        return re.sub(pattern, lambda found: self._replacements[found[0]], text)

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
            move = ", which holds media: move these into the user's turn" if holds else ""
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


_PROBE = " A word, 2 words\n\tand more: \u00e4\u4e2d\U0001f600 "


def _backend_of(tokenizer: Any, placeholders: Sequence[str], special_tokens: bool) -> Any:
    """What does the work behind `tokenizer`, at a quarter of the price for short texts; None where transformers does
    something of its own before or after."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    texts = [_PROBE, *(_PROBE + text + _PROBE + text for text in [*placeholders, *tokenizer.all_special_tokens])]
    for adds in (False, True) if special_tokens else (False,):
        by_tokenizer = [tokenizer(text, add_special_tokens=adds)["input_ids"] for text in texts]  # which also turns off
        # truncation and padding that a tokenizer.json may ask for
        if by_tokenizer != [backend.encode(text, add_special_tokens=adds).ids for text in texts]:
            return None
    return backend


def _runs(chosen: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """`[start, stop)` of the runs of True."""
    edges = [i for i, (a, b) in enumerate(zip([False, *chosen], [*chosen, False], strict=True)) if a != b]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
