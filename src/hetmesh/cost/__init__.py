"""What a step costs, computed from sizes alone: FLOPs, seconds, memory, machines; and where to cut a chain of layers.

shapes.py   what of a module costs anything: weights and attention, layer by layer
work.py     how much of it a global batch gives to each module and lane
flops.py    forward and backward FLOPs, aware of what is frozen
memory.py   bytes of parameters, gradients and optimizer state per rank
experts.py  tokens that travel between experts, and what these keep
activations.py  bytes that a layer keeps from forward to backward
layer_time.py   seconds of a layer on a machine
collectives.py  seconds of collectives and messages
fitted.py   seconds of a layer as fitted to measurements
partition.py    the exact cut of a chain of layers into stages
stage_counts.py how many stages each module of a graph gets
step_costs.py   seconds and bytes of every stage and transfer of a step
machine.py  peak rates, memory and links (machines/*.toml)
"""

from hetmesh.cost.activations import activation_bytes
from hetmesh.cost.fitted import Coefficients, HeldOut, Observation, Profile, fit, layer_kind
from hetmesh.cost.flops import Flops, layer_flops, module_flops
from hetmesh.cost.layer_time import LayerTime, Rates, frozen_blind, layer_time, module_times, upstream_flags
from hetmesh.cost.machine import MACHINES, Machine, find_machine, load_machine
from hetmesh.cost.memory import StaticMemory, module_memory, static_memory
from hetmesh.cost.partition import StageMemory, find_partition, partition, stage_costs
from hetmesh.cost.shapes import LayerShape, ModuleShape, WeightShape
from hetmesh.cost.stage_counts import Chain, StageCounts, stage_counts, time_of_cuts
from hetmesh.cost.step_costs import Lanes, Parts, StageBytes, StageCost, StageParts, StepCosts, TransferCost
from hetmesh.cost.work import Work, computed_work, imbalance, lane_work, sample_work, total_work

__all__ = [
    "MACHINES",
    "Chain",
    "Coefficients",
    "Flops",
    "HeldOut",
    "Lanes",
    "LayerShape",
    "LayerTime",
    "Machine",
    "ModuleShape",
    "Observation",
    "Parts",
    "Profile",
    "Rates",
    "StageBytes",
    "StageCost",
    "StageCounts",
    "StageMemory",
    "StageParts",
    "StaticMemory",
    "StepCosts",
    "TransferCost",
    "WeightShape",
    "Work",
    "activation_bytes",
    "computed_work",
    "find_machine",
    "find_partition",
    "fit",
    "frozen_blind",
    "imbalance",
    "lane_work",
    "layer_flops",
    "layer_kind",
    "layer_time",
    "load_machine",
    "module_flops",
    "module_memory",
    "module_times",
    "partition",
    "sample_work",
    "stage_costs",
    "stage_counts",
    "static_memory",
    "time_of_cuts",
    "total_work",
    "upstream_flags",
]
