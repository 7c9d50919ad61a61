"""Machine descriptions."""

import pytest

from hetmesh.cost import MACHINES, find_machine, load_machine
from hetmesh.errors import RecipeError


def test_the_machines_that_come_with_hetmesh():
    assert MACHINES == ("a100", "b200", "cpu", "gb200", "h100", "h200")
    for name in MACHINES:
        machine = load_machine(name)
        assert machine.name == name
        assert machine.source
        assert machine.node_bandwidth > 0
    assert load_machine("h100").peak("bfloat16") == 989.4e12
    assert load_machine("cpu").peak("float32") is None


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        *(("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100")),
        *(("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200")),
    ],
)
def test_a_device_finds_its_machine(reported, name):
    found = find_machine(reported)
    assert found is not None
    assert found.name == name
    assert find_machine("NVIDIA GeForce GTX 970") is None


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("busy_slowdown = [1, 1.5]\n[peak_flops]\nfloat32 = 5e10\n")
    machine = load_machine(str(path))
    assert machine.busy_slowdown == (1.0, 1.5)
    assert (machine.name, machine.peak("float32"), machine.memory_bytes) == ("mine", 5e10, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peak = 3", r"unknown keys \['peak'\]; valid are"),
        ("peak_flops = 3", "peak_flops must be a table"),
        ("[peak_flops]\nfloat32 = 'fast'", "peak_flops.float32 must be a number"),
        ("memory_bytes = -1", "memory_bytes must be a number from 0"),
        ("memory_bytes", "not valid TOML"),
        ("busy_slowdown = 1.2", "busy_slowdown must be a list of numbers, got 1.2"),
        ("busy_slowdown = [1, true]", "busy_slowdown must be a list of numbers"),
        ("busy_slowdown = [1.0, nan]", "busy_slowdown must be a list of numbers"),
        ("busy_slowdown = [1.1, 1.2]", "busy_slowdown must begin with 1 and never fall"),
        ("busy_slowdown = [1, 1.3, 1.2]", "busy_slowdown must begin with 1 and never fall"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_machine(str(path))


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(RecipeError, match="machine 'h1000': valid are a100, b200, cpu, gb200, h100, h200, or the path"):
        load_machine("h1000")
