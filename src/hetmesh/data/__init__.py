"""Sources of samples, their metadata and payloads, and the resumable loader.

source.py   Sample, the Source protocol
registry.py sources by name: make_source
check.py    is a sample well-formed, does its payload agree with its metadata
expand.py   one placeholder token per row; truncation (expand_arrays.py: of many samples at once)
shuffle.py  permutations that cost no memory
payloads.py samples loaded in this process, or in worker processes ahead of need
spans.py    a stretch of a file, read alone
loader.py   Loader: the global batch of a step as metadata, payloads on demand
digits.py   the demo: questions about handwritten digits (digits.npz, README.md)
memory.py     samples that are in memory already
mixture.py    several sources as one, by weight
digits_omni.py  the same with tones beside images
synthetic.py  random text and images of realistic sizes
conversations.py  conversations about local images and recordings
turns.py          the turns of a conversation, from two forms
open_store.py     which store a path names
stores.py         where records and media lie: JSON files, tar shards
tables.py         the same in parquet and arrow
index.py          lengths, sizes and offsets of a source, kept beside the data
metas.py          metadata of many samples as arrays
chat.py           their tokens: a tokenizer's chat template, and which tokens are the assistant's
images.py         images as a directory wants them; image_settings.py: what it says, and its class where it is silent
tiles.py          images cut into tiles
recordings.py     log-mel features of recordings
"""

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
