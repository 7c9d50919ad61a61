"""Timelines: what a schedule takes, by simulation or from a recording, and where ranks wait. Pure values.

step_model.py      StepModel: graph, shapes, machine -> the StepCosts of any plan and schedule
stage_costs.py     a stage: its layers, FSDP's gathers, keys fetched by context parallelism
layer_costs.py     a layer as coefficients of rows, pairs and targets, once per kind of layer
rank_work.py       what each rank computes: real tokens of packed samples, shares of context parallelism
transfer_costs.py  bytes and seconds of every transfer
action_parts.py    attention, MLP and sums of tensor parallelism inside an action
lanes.py           which lanes of a stage act apart, equal replicas made one
program.py   a schedule and its costs as columns of integers and seconds, rank classes
busy.py      how much longer actions take beside other busy ranks of their node
engine.py    `simulate`: the columns -> Timeline
walk.py      one pass over the order
beside.py    the same with encoder kernels in the LLM's collectives
memory.py    the most bytes of each track, and what they are
rank_memory.py     what each rank holds when it holds most, communicators included, and whether it fits
timeline.py  Timeline: spans as columns, peak memory; from a recording, to and from JSON
bubbles.py   idle time by class; lower bounds of a makespan
latest.py    the latest starts that keep a makespan (ALAP), dependency points of a stage
"""

from hetmesh.simulate.bubbles import (
    CLASSES,
    Bubbles,
    average_bubbles,
    bubble_spans,
    bubbles,
    busiest_rank,
    critical_path,
)
from hetmesh.simulate.engine import simulate
from hetmesh.simulate.latest import DependencyPoints, dependency_points, latest_starts
from hetmesh.simulate.layer_costs import LayerCosts
from hetmesh.simulate.memory import peak_rows
from hetmesh.simulate.rank_memory import MemoryFit, RankMemory, rank_memory, worst
from hetmesh.simulate.rank_work import RankWork, rank_work
from hetmesh.simulate.step_model import StepModel
from hetmesh.simulate.timeline import KINDS, Span, Spans, Timeline

__all__ = [
    "CLASSES",
    "KINDS",
    "Bubbles",
    "DependencyPoints",
    "LayerCosts",
    "MemoryFit",
    "RankMemory",
    "RankWork",
    "Span",
    "Spans",
    "StepModel",
    "Timeline",
    "average_bubbles",
    "bubble_spans",
    "bubbles",
    "busiest_rank",
    "critical_path",
    "dependency_points",
    "latest_starts",
    "peak_rows",
    "rank_memory",
    "rank_work",
    "simulate",
    "worst",
]
