"""What is found out about layers without attention, on a decoder that no library has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hetmesh.models.split.mixer_probe import padded_mixers


class Sums(nn.Module):
    """The sum of all tokens so far."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def forward(self, hidden_states, cache=None, **kwargs):
        return (hidden_states @ self.weight).cumsum(1)


class Means(Sums):
    """Of all tokens, later ones too."""

    def forward(self, hidden_states, cache=None, **kwargs):
        return (hidden_states @ self.weight).mean(1, keepdim=True).expand_as(hidden_states)


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
    rows = torch.nn.functional.pad(hidden_states, (weight.shape[1] - 1, 0))
    return torch.nn.functional.conv1d(rows, weight[:, None], bias, groups=len(weight))


class Convolves(Sums):
    """The last tokens, by a function of which hetmesh has its own."""

    def forward(self, hidden_states, cache=None, **kwargs):
        return causal_conv1d_fn(hidden_states.transpose(1, 2), self.weight, **kwargs).transpose(1, 2)


class Both(Sums):
    """Something else remembers, too."""

    def forward(self, hidden_states, cache=None, **kwargs):
        mixed = causal_conv1d_fn(hidden_states.transpose(1, 2), self.weight, **kwargs).transpose(1, 2)
        return mixed + hidden_states.cumsum(1)


class Attends(nn.Module):
    def forward(self, hidden_states, cache=None):
        return ALL_ATTENTION_FUNCTIONS[0](hidden_states)


ALL_ATTENTION_FUNCTIONS = (torch.tanh,)


class OfIds(nn.Module):
    def forward(self, input_ids, cache=None):
        return input_ids


class Block(nn.Module):
    def __init__(self, mixer, beside=None, hands_on=True):
        super().__init__()
        self.norm, self.mixer, self.hands_on = nn.LayerNorm(4), mixer(), hands_on
        self.mlp = nn.Linear(4, 4)  # never has weights here
        if beside is not None:
            self.beside = beside()

    def forward(self, hidden_states, cache=None, attention_state=None, **kwargs):
        more = {"attention_state": attention_state} if self.hands_on and attention_state is not None else {}
        return hidden_states + self.mlp(self.mixer(self.norm(hidden_states), cache=cache, **more))


class Decoder(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=4)
        self.layers = nn.ModuleList([Block(Means), Block(*args)])

    def forward(self, inputs_embeds, position_ids=None, attention_mask=None, use_cache=False, **kwargs):
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, **kwargs)
        return inputs_embeds


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ((Convolves,), False),
        ((Sums,), True),
        ((Both,), True),
        ((Means,), "samples in one row change each other's results"),
        ((Convolves, None, False), "samples in one row change each other's results"),
        ((Sums, Attends), "what they remember of earlier tokens is not known"),
        ((Attends,), "what they remember of earlier tokens is not known"),
        ((Sums, OfIds), "its OfIds reads the ids of earlier tokens"),
    ],
)
def test_how_mixers_take_samples_in_one_row(args, found):
    with torch.device("meta"):
        decoder = Decoder(*args)
    blocks = {f"layers.{i}": layer for i, layer in enumerate(decoder.layers)}
    assert padded_mixers(decoder, blocks, "layers.1") == found


def test_a_layer_that_is_not_found_is_an_answer():
    assert padded_mixers(Decoder(Sums), {}, "") == "they are not found among the layers of its decoder"
