"""What the tables of a recipe have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PrivateAttr


class Section(BaseModel):
    """Base of the tables: frozen, no unknown keys, no conversion between types except int to float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


class NamesCode(Section):
    """A table that may name code of its own, `"package.module:Class"`, which may lie beside the recipe's file."""

    _folder: str | None = PrivateAttr(default=None)  # no key: it says where the file was, not what it says

    @property
    def folder(self) -> str | None:
        """The folder of the file that the recipe was read from, if it names code."""
        return self._folder

    def beside(self, folder: str) -> None:
        """Say where the recipe's file lies."""
        self._folder = folder
