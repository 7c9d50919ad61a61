"""Files of lengths: what is read, and what is wrong with which line."""

import json

import pytest

from hetmesh.data.lengths import read_lengths
from hetmesh.errors import RecipeError


def test_a_file_of_lengths(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"vision": 1024, "llm": 700}\n\n{"llm": 5}\n{"llm": 9, "audio": 16777216}\n')
    found = read_lengths(path)
    assert found.modules == ("vision", "llm", "audio")
    assert found.tokens.tolist() == [[1024, 700, 0], [0, 5, 0], [0, 9, 16777216]]
    assert found.lines.tolist() == [1, 3, 4]
    assert found.of("audio").tolist() == [0, 0, 16777216]
    assert found.of("other").tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON: "),
        ("[" * 100_000, "line 2: not JSON: "),
        ("[1]", r"line 2: got \[1\]; valid are tokens per module"),
        ("{}", r"line 2: got \{\}; valid"),
        ('{"llm": -1}', "line 2, key 'llm': got -1; valid are whole numbers of tokens from 0 to 16777216"),
        ('{"llm": 1.5}', "key 'llm': got 1.5; valid"),
        ('{"llm": true}', "key 'llm': got True; valid"),
        ('{"llm": "7"}', "key 'llm': got '7'; valid"),
        ('{"llm": 16777217}', "key 'llm': got 16777217; valid"),
        (
            '{"vison": 1}',
            "line 2, key 'vison': unknown module 'vison'; did you mean 'vision'[?] Valid are: vision, llm",
        ),
        ('{"llm": ' + json.dumps("x" * 500) + "}", "key 'llm': got 'x{59}; valid"),
    ],
)
def test_a_bad_line_is_named_with_its_key_and_what_is_valid(tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"llm": 5}\n' + line)
    with pytest.raises(RecipeError, match=rf"^{path}, (line 2, )?{said}"):
        read_lengths(path, ("vision", "llm"))


def test_files_without_samples(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n")
    with pytest.raises(RecipeError, match="no samples"):
        read_lengths(path)
    path.write_bytes(b'{"llm": 1}\n\xff\n')
    with pytest.raises(RecipeError, match=r"cannot be read: .*utf-8"):
        read_lengths(path)
    for name in (str(tmp_path / "nowhere"), "a\0b", str(tmp_path)):
        with pytest.raises(RecipeError, match="cannot be read"):
            read_lengths(name)
