"""Digits whose samples have values for a loss of one's own."""

from dataclasses import replace

import torch

from hetmesh.data.digits import DigitsSource


class ValuedDigits(DigitsSource):
    """`weight`, one for each target, says which token it is (1 + id / 7); `reward` is one number of the sample."""

    @property
    def abilities(self):
        return replace(super().abilities, values=("weight", "reward"))

    def load(self, index, kinds=None):
        sample = super().load(index, kinds)
        ((start, stop),) = self.meta(index).targets
        weight = 1 + sample.tokens[start:stop].double() / 7
        return replace(sample, values={"weight": weight, "reward": torch.tensor(index % 5 - 1.5, dtype=torch.float64)})


class LessValued(ValuedDigits):
    """Its samples lack a value."""

    def load(self, index, kinds=None):
        sample = super().load(index, kinds)
        return replace(sample, values={"weight": sample.values["weight"]})
