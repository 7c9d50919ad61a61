"""The picture of the digits that a run draws: `python tools/draw_digits.py RUN FILE`; ten columns, a row per seed."""

import argparse
from pathlib import Path

import torch
from PIL import Image

from hetmesh.checkpoint.saved_run import saved_run
from hetmesh.data.digits import WORDS, DigitsSource
from hetmesh.data.synthetic import MemorySource
from hetmesh.inference.drawn import drawn_item, write_image
from hetmesh.training.one_process import OneProcess

MAGNIFIED, GAP = 5, 1  # pixels of the picture per pixel of a digit; of a digit, between two


def main() -> None:
    """Ask for every digit with every seed, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    saved = saved_run(args.run, None)
    model = OneProcess.load(saved.recipe, saved)
    source = model.resolved.source
    assert isinstance(source, DigitsSource)
    rows = []
    for seed in range(args.seeds):
        questions = [source.prompt(f"draw {'an' if word == 'eight' else 'a'} {word}", ()) for word in WORDS]
        asked = MemorySource(questions, source.vocab_size, source.placeholders, source.pad_id)
        digits = [drawn_item(model, asked, i, seed=seed) for i in range(len(questions))]
        rows.append(torch.cat([torch.nn.functional.pad(digit, (GAP,) * 4, value=-1) for digit in digits], 2))
    write_image(-torch.cat(rows, 1), args.file)  # black on white
    with Image.open(args.file) as image:
        larger = image.resize((image.width * MAGNIFIED, image.height * MAGNIFIED), Image.Resampling.NEAREST)
    larger.save(args.file, optimize=True)
    print(f"{args.file}: {larger.width} x {larger.height} pixels, {args.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
