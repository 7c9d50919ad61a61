"""The table of families that the generic split was tried with: what can be done with them, as the code declares it.

    python tools/family_table.py            # print it
    python tools/family_table.py --write    # put it into its page, src/hetmesh/models/split/README.md

Each family is a tiny random model of transformers (`support.tiny_vlms`); a config with other layers may allow
less, which `hetmesh check` says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import page_table

PAGE = Path(__file__).parents[1] / "src" / "hetmesh" / "models" / "split" / "README.md"

FAMILIES: Mapping[str, str] = {
    "llava": "LLaVA",
    "llava_granite": "LLaVA with Granite",
    "llava_cohere2": "LLaVA with Cohere 2",
    "llava_onevision": "LLaVA-OneVision",
    "internvl": "InternVL",
    "gemma3": "Gemma 3",
    "paligemma": "PaliGemma",
    "idefics3": "Idefics 3",
    "smolvlm": "SmolVLM",
    "mistral3": "Mistral 3",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "glm4v": "GLM-4V",
    "qwen2_audio": "Qwen2-Audio",
    "qwen2_5_omni": "Qwen2.5-Omni (thinker)",
}
"""Rows, by the name of the tiny model."""


def row_of(name: str, folder: Path) -> Mapping[str, str]:
    """The cells of a family."""
    from hetmesh.recipe.recipe import parse_recipe
    from hetmesh.resolve.resolved import resolve
    from support import tiny_vlms
    from support.can_do import can_do

    recipe = parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save(name, folder)))
    return can_do(resolve(recipe).adapters, recipe.llm)


def table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """The table in Markdown."""
    columns = list(next(iter(rows.values())))
    return page_table.markdown(["family", *columns], ([name, *row.values()] for name, row in rows.items()))


def written(text: str) -> str:
    """The table that a page has."""
    return page_table.written(text, "family_table")


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into its page")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        made = table({title: row_of(name, Path(folder)) for name, title in FAMILIES.items()})
    if args.write:
        page_table.write(PAGE, "family_table", made)
    else:
        print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
