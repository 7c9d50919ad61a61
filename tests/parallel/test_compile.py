"""torch.compile where there is no compiler."""

import pytest
from torch import nn

from hetmesh.parallel.compile import apply_compile, missing_compiler


def test_without_a_compiler_modules_run_uncompiled_and_it_says_so(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert missing_compiler("inductor", "cpu") == "no C++ compiler was found"
    assert missing_compiler("aot_eager", "cpu") is None
    block = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="no C.. compiler was found, so modules run uncompiled"):
        apply_compile([block], "inductor", "cpu")
    assert block._compiled_call_impl is None
    apply_compile([block], "eager", "cpu")
    assert block._compiled_call_impl is not None
    assert list(block.state_dict()) == ["weight", "bias"]
