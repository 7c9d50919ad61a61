"""`hetmesh generate RUN "question" --image FILE`: ask what a run has learned, or what a recipe starts from; with `--out
FILE` the answer is an image."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetmesh.errors import UsageError

if TYPE_CHECKING:
    from hetmesh.data.source import Source
    from hetmesh.training.one_process import OneProcess


MEDIA = ("--image", "--video", "--audio")


class _Media(argparse.Action):
    """Images and recordings in the order in which they are given."""

    def __call__(self, parser, namespace, values, option_string=None):
        kind = str(option_string).lstrip("-")
        namespace.media = [*(namespace.media or ()), (kind, Path(str(values)))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask, what, and how the answer is drawn."""
    parser.add_argument("run", metavar="RUN|RECIPE", help="a run's dump folder, or a recipe whose modules have weights")
    parser.add_argument("question", nargs="?", help="what to ask; <image> in it stands for the next image")
    parser.add_argument(*MEDIA, dest="media", action=_Media, metavar="FILE", help="may be repeated")
    parser.add_argument("--sample", type=int, metavar="N", help="ask held-out sample N of the recipe's data instead")
    parser.add_argument("--step", type=int, help="the checkpoint of that step (the newest one)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="most tokens of an answer (128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token each time (0)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write the image that is the answer: seven.png"
    )
    parser.add_argument("--seed", type=int, default=0, help="of an image, and of temperatures above 0 (0)")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Ask, and print or write the answer; what is asked of whom goes to stderr."""
    _check(args)
    import torch

    from hetmesh.checkpoint.saved_run import saved_run
    from hetmesh.recipe.recipe import load_recipe
    from hetmesh.training.one_process import OneProcess

    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = Path(args.run)
    if path.is_dir() or (not path.exists() and path.suffix != ".toml"):
        if overrides:
            raise UsageError(f"{overrides[0]}: the recipe of a run that is over cannot be changed")
        saved = saved_run(path, args.step)
        print(f"weights of {saved.path}", file=sys.stderr, flush=True)
        model = OneProcess.load(saved.recipe, saved, device)
    else:
        if args.step is not None:
            raise UsageError("--step is of a run; give its dump folder in place of the recipe")
        model = OneProcess.load(load_recipe(path, overrides), None, device)
    for line in _held_out(model, args) if args.sample is not None else _asked(model, args):
        print(line, flush=True)
    return 0


def _check(args: argparse.Namespace) -> None:
    if (args.question is None) == (args.sample is None):
        raise UsageError('give a question, or --sample N: hetmesh generate RUN "What is this?" --image FILE')
    if args.sample is not None and args.media:
        raise UsageError("--sample N has its own media; leave --image and --audio out")
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens}: must be at least 1")
    if not 0 <= args.temperature < float("inf"):
        raise UsageError(f"--temperature {args.temperature}: must be a number from 0 on")
    for _, file in args.media or ():
        if not file.is_file():
            raise UsageError(f"{file}: there is no such file")


def _write(model: OneProcess, source: Source, index: int, args: argparse.Namespace) -> str:
    from hetmesh.inference.drawn import drawn_item, write_image

    write_image(drawn_item(model, source, index, seed=args.seed), args.out)
    return f"written to {args.out}"


def _asked(model: OneProcess, args: argparse.Namespace) -> Iterator[str]:
    from hetmesh.data.synthetic import MemorySource
    from hetmesh.inference.drawn import made_of
    from hetmesh.inference.generate import prompt_source

    asker = prompt_source(model.resolved.source, model.resolved.recipe)
    sample = asker.prompt(args.question, args.media or ())
    source = MemorySource(
        [sample], model.resolved.source.vocab_size, model.resolved.source.placeholders, model.resolved.source.pad_id
    )
    if args.out is not None:
        yield _write(model, source, 0, args)
        return
    if made_of(model, sample[0]):
        raise UsageError(f"the answer to {args.question!r} is an image; say where to write it: --out FILE")
    answer = asker.decode(_tokens(model, source, 0, args))
    if not answer and not args.media and source.placeholders:
        option = " or ".join(f"--{kind} FILE" for kind in source.placeholders if f"--{kind}" in MEDIA)
        raise UsageError(f"the answer to {args.question!r} is empty; if it is about a file, give it: {option}")
    yield answer


def _held_out(model: OneProcess, args: argparse.Namespace) -> Iterator[str]:
    from hetmesh.data.answers import answer_start
    from hetmesh.data.source import QuestionSource
    from hetmesh.inference.drawn import made_of
    from hetmesh.resolve.samples import held_out_source

    if not model.resolved.recipe.validation.enable:
        raise UsageError("--sample: validation.enable = false, so the recipe has no held-out samples; ask a question")
    source = held_out_source(model.resolved.recipe)
    if source is None:
        raise UsageError("--sample: the recipe's data have no validation split; ask a question")
    index = args.sample
    if not 0 <= index < len(source):
        raise UsageError(f"--sample {index}: there are held-out samples 0 to {len(source) - 1}")
    if args.out is not None:
        yield _write(model, source, index, args)
        return
    if not source.meta(index).targets and made_of(model, source.meta(index)):
        raise UsageError(f"the answer of sample {index} is an image; say where to write it: --out FILE")
    if isinstance(source, QuestionSource):
        picture, question, truth = source.picture(index), source.question(index), source.answer(index)
        yield from filter(None, (picture, f"Q: {question}"))
    else:
        meta, tokens = source.meta(index), source.load(index, ()).tokens.tolist()
        start = answer_start(meta)
        yield f"Q: {_text(model, tokens[:start])}"
        truth = _text(model, tokens[start : meta.targets[-1][1]]) if meta.targets else ""
    said = _text(model, _tokens(model, source, index, args))
    yield f"A: {said}   ({'right' if said == truth else f'the data have {truth!r}'})"


def _tokens(model: OneProcess, source: Source, index: int, args: argparse.Namespace) -> list[int]:
    from hetmesh.data.answers import end_tokens
    from hetmesh.inference.generate import answer_tokens

    ends = end_tokens(model.resolved.source, model.resolved.recipe)
    most, temperature, seed = args.max_new_tokens, args.temperature, args.seed
    said = list(answer_tokens(model, source, index, max_tokens=most, ends=ends, temperature=temperature, seed=seed))
    if len(said) == most and said[-1] not in ends:
        print(f"note: stopped after {most} tokens (--max-new-tokens)", file=sys.stderr)
    return said


def _text(model: OneProcess, tokens: Sequence[int]) -> str:
    """Tokens as text where the source can tell, else as numbers."""
    from hetmesh.data.source import abilities_of

    decode = abilities_of(model.resolved.source).decode
    return " ".join(map(str, tokens)) if decode is None else decode(tokens)
