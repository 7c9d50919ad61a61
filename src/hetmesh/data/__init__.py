"""Sources of samples, their metadata and payloads, and the resumable loader."""

from hetmesh.data.conversations import ConversationsSource
from hetmesh.data.digits import DigitsSource
from hetmesh.data.expand import Expander, expand_tokens
from hetmesh.data.loader import Loader
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.recipe_sources import make_source, recipe_source
from hetmesh.data.source import QuestionSource, Sample, Source, SourceAbilities, check_meta, check_sample
from hetmesh.data.synthetic import MemorySource, SyntheticSource
