"""What models do with their logits behind the head, and whether shares of the vocabulary go through it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hetmesh.models import AdapterRequest
from hetmesh.models.named.qwen3 import Qwen3Adapter
from hetmesh.models.split.after_head import tried_head, whole_head
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from support import tiny_vlms

VOCAB, FEATURES = 11, 4


class Shell(nn.Module):
    """As a model of transformers: an inner model, a head, and something behind it."""

    def __init__(self, behind, before=lambda x: x):
        super().__init__()
        self.model = nn.Identity()
        self.lm_head = nn.Linear(FEATURES, VOCAB, bias=False)
        self.behind, self.before = behind, before

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.behind(self.lm_head(self.before(self.model(input_ids).last_hidden_state))))


def without_a_token(logits):
    logits = logits.clone()
    logits[..., 7] = -torch.inf
    return logits


BEHIND = {
    "nothing": (lambda x: x, True),
    "scaled": (lambda x: x / 3, True),
    "soft-capped": (lambda x: 30 * torch.tanh(x / 30), True),
    "raised": (lambda x: x.float(), True),
    "normalised": (lambda x: x.log_softmax(-1), False),
    "shifted by a bias": (lambda x: x + torch.arange(VOCAB), False),
    "cut off": (lambda x: x[..., :9], False),
    "without a token": (without_a_token, False),
    "of its own tokens": (lambda x: x.roll(1, -1), False),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_leaves_logits_as_they_are_and_what_treats_each_by_itself_is_found_out(name):
    behind, apart = BEHIND[name]
    found = tried_head(Shell(behind), "model", "lm_head", VOCAB, FEATURES)
    assert found == (name in ("nothing", "raised"), apart)


def test_what_changes_hidden_states_before_the_head_is_found_out():
    """As MiniCPM does, which divides them."""
    assert tried_head(Shell(lambda x: x, lambda x: x / 3), "model", "lm_head", VOCAB, FEATURES) == (False, True)


class OfOnesOwn(Qwen3Adapter):
    def logits(self, model, hidden):
        return 2 * super().logits(model, hidden)


def test_logits_of_ones_own_are_not_passed_by():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    given = AdapterRequest("llm", {**sizes, "head_dim": 4}, vocab_size=VOCAB)
    assert Qwen3Adapter.make(given).plain_head
    assert not OfOnesOwn.make(given).plain_head


def test_a_head_inside_another_module_is_not_tried():
    for head in ("inside.lm_head", "head"):
        assert tried_head(Shell(lambda x: x), "model", head, VOCAB, FEATURES) == (False, False)


def test_logits_are_those_of_the_whole_forward():
    shell, hidden = Shell(lambda x: x / 3), torch.randn(5, FEATURES)
    torch.testing.assert_close(whole_head(shell, "model", hidden), shell.lm_head(hidden) / 3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), [("llava_granite", "lm_head"), ("qwen2_audio", "lm_head"), ("gemma3", "")])
def test_heads_of_families_leave_shares_unless_tied(tmp_path, name, head):
    path = tiny_vlms.save(name, tmp_path)
    assert resolve(parse_recipe(tiny_vlms.recipe_text(path))).adapters["llm"].abilities.head == head
