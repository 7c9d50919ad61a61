"""Where the values of an exported tensor come from: one tensor of the run, or blocks of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetmesh.errors import RecipeError
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.models.weights.stored_form import StoredBlock, StoredForm, by_stored, stored_shape


@dataclass(frozen=True)
class Origin:
    """Where one tensor comes from.

    Attributes:
        keys: in the checkpoint: the tensor, and where it has an adapter that is to be merged, A and B.
        scale: of the product of B and A.
        source: the directory in which the first key is a tensor, where the checkpoint does not have it.
    """

    keys: tuple[str, ...]
    scale: float = 0.0
    source: Pretrained | None = None


@dataclass(frozen=True)
class Regrouped:
    """A tensor whose values are blocks of others: one expert's, where the run has all experts in one tensor.

    Attributes:
        shape: its own.
        parts: where each block's values come from.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Origin, StoredBlock], ...]


def as_stored(
    origins: Mapping[str, Origin], forms: Mapping[str, StoredForm], source: Pretrained | None = None
) -> dict[str, Origin | Regrouped]:
    """The tensors that files get, by their names there.

    Args:
        origins: by name, where the values of the run's tensors come from.
        forms: by the same names, in which form they are stored.
        source: of what no module of the run has.

    Raises:
        RecipeError: the run has a part of a stored tensor alone.
    """
    found: dict[str, Origin | Regrouped] = {}
    for name, blocks in by_stored(forms).items():
        if len(blocks) == 1 and forms[blocks[0][0]].is_whole:
            found[name] = origins[blocks[0][0]]
            continue
        shape = stored_shape(blocks)
        if shape is None or (source is not None and shape != source.tensors[name].shape):
            raise RecipeError(f"{source}: {name} holds more than the run has of it, so it cannot be written")
        found[name] = Regrouped(shape, tuple((origins[own], block) for own, block in blocks))
    return found
