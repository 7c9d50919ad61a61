"""Sources of samples, their metadata and payloads, and the resumable loader."""

from hetmesh.data.check import check_meta, check_sample
from hetmesh.data.conversations import ConversationsSource
from hetmesh.data.digits import DigitsSource
from hetmesh.data.expand import Expansion, ItemRows, ModuleRows, expand, expand_tokens
from hetmesh.data.expand_arrays import Expander
from hetmesh.data.in_memory import MemorySource
from hetmesh.data.loader import DrawnSample, Loader
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.registry import SOURCES, make_source, recipe_source
from hetmesh.data.source import QuestionSource, Sample, Source
from hetmesh.data.synthetic import SyntheticSource

__all__ = [
    "SOURCES",
    "ConversationsSource",
    "DigitsSource",
    "DrawnSample",
    "Expander",
    "Expansion",
    "ItemRows",
    "Loader",
    "MemorySource",
    "MixtureSource",
    "ModuleRows",
    "QuestionSource",
    "Sample",
    "Source",
    "SyntheticSource",
    "check_meta",
    "check_sample",
    "expand",
    "expand_tokens",
    "make_source",
    "recipe_source",
]
