"""The examples in the room's README run as they stand."""

import importlib
import re
from pathlib import Path

import pytest

import hetmesh.testing

README = Path(hetmesh.testing.__file__).with_name("README.md")


@pytest.mark.slow
def test_examples_run(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "hetmesh_readme_example.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    example = importlib.import_module("hetmesh_readme_example")
    example.test_my_transfer()
    example.test_total()
