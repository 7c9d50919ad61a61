"""Texts in which row tokens stand by the hundreds: of each run of one of them one is tokenised, and then repeated."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np


class RowRuns:
    """Runs of those of some tokens that are special ones, which a tokenizer finds before anything else.

    Args:
        tokenize: the tokenizer's `__call__`.
        special: its tokens by their ids; `ids`: of row tokens.
    """

    def __init__(self, tokenize: Callable[..., Any], special: Mapping[int, Any], ids: Collection[int]) -> None:
        known = [token for token in ids if token in special]
        self._tokenize, self._ids = tokenize, np.array(known, np.int64)
        texts = "|".join(re.escape(special[token].content) for token in known)
        self._runs = re.compile(rf"({texts or '(?!)'})\1*")

    def tokenized(self, text: str, arguments: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, Any]:
        """Ids of a text, int64 `[tokens]`, the characters that each stands for, `[tokens, 2]`, and all that the
        tokenizer makes when it is called with `arguments`. Raises ValueError: its tokens are not the runs, or it may
        pad or cut them."""
        if arguments.get("padding") or arguments.get("truncation"):
            raise ValueError("how many tokens there are depends on all of them")
        times, tensors = list[int](), arguments.get("return_tensors")

        def one(run: re.Match[str]) -> str:
            times.append(len(run[0]) // len(run[1]))
            return run[1]

        short = self._runs.sub(one, text)
        made = self._tokenize([short], **{**arguments, "return_tensors": None})
        ids, offsets = np.array(made.encodings[0].ids), np.array(made.encodings[0].offsets).reshape(-1, 2)
        copies, lengths = np.ones(len(ids), np.int64), offsets[:, 1] - offsets[:, 0]
        copies[(ids[:, None] == self._ids).any(1)] = times  # raises ValueError where they are others
        gained = lengths * (copies - 1)
        further = np.cumsum(gained) - gained
        further[~offsets.any(1)] = 0  # tokens that stand for no text
        within = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
        moved = np.repeat(further, copies) + within * np.repeat(lengths, copies)
        whole = {key: np.repeat(values, copies, axis=1) for key, values in made.items()}
        whole = whole if tensors else {key: values.tolist() for key, values in whole.items()}
        return (
            np.repeat(ids, copies),
            np.repeat(offsets, copies, axis=0) + moved[:, None],
            type(made)(whole, None, tensors),
        )
