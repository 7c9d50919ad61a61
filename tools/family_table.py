"""The README's table of families and what hetmesh can do with them, from what the code declares.

    python tools/family_table.py            # print it
    python tools/family_table.py --write    # put it into README.md

Each family is a tiny random model of transformers (`hetmesh.testing.tiny_vlms`); a config with other layers may allow
less, which `hetmesh check` says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tools/family_table.py -->", "<!-- end -->"

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
    "glm4v": "GLM-4V",
    "qwen2_audio": "Qwen2-Audio",
    "qwen2_5_omni": "Qwen2.5-Omni (thinker)",
}
"""Rows, by the name of the tiny model."""


def row_of(name: str, folder: Path) -> Mapping[str, str]:
    """The cells of a family."""
    from hetmesh.models.can_do import can_do
    from hetmesh.recipe.recipe import parse_recipe
    from hetmesh.testing import tiny_vlms
    from hetmesh.training.describe import describe

    recipe = parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save(name, folder)))
    return can_do(describe(recipe)[1], recipe.sink)


def table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """The table in Markdown."""
    columns = list(next(iter(rows.values())))
    lines = [f"| family | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(row.values())} |" for name, row in rows.items()]
    return "\n".join(lines)


def written(text: str) -> str:
    """The table that a README has."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        made = table({title: row_of(name, Path(folder)) for name, title in FAMILIES.items()})
    if not args.write:
        print(made)
        return 0
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    if not found or END not in rest:
        raise SystemExit(f"family_table.py: README.md has no place for it, {BEGIN} and {END}")
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
