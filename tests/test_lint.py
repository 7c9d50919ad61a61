"""Lint and types are part of the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def passes(*command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_check():
    passes("ruff", "check", ".")


def test_ruff_format():
    passes("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_types():
    passes("mypy")
