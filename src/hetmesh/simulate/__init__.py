"""Timelines: how long a schedule takes, by simulation or from a recording, and where ranks wait. Pure values."""

from hetmesh.simulate.bubbles import CLASSES, Bubbles, average_bubbles, bubble_spans, bubbles
from hetmesh.simulate.engine import simulate
from hetmesh.simulate.layer_costs import LayerCosts
from hetmesh.simulate.predicted_memory import MemoryFit, RankMemory, largest_memory, peak_rows, rank_memory
from hetmesh.simulate.rank_work import RankWork, rank_work
from hetmesh.simulate.step_model import StepModel
from hetmesh.simulate.timeline import Span, Spans, Timeline
