"""What a step costs, computed from sizes alone: FLOPs, memory, machines.

shapes.py   what of a module costs anything: weights and attention, layer by layer
work.py     how much of it a global batch gives to each module and lane
flops.py    forward and backward FLOPs, aware of what is frozen
memory.py   bytes of parameters, gradients and optimizer state per rank
step_costs.py  seconds and bytes of every stage and transfer of a step
machine.py  peak rates, memory and links (machines/*.toml)
"""

from hetmesh.cost.flops import Flops, layer_flops, module_flops
from hetmesh.cost.machine import MACHINES, Machine, find_machine, load_machine
from hetmesh.cost.memory import StaticMemory, static_memory
from hetmesh.cost.shapes import LayerShape, ModuleShape, WeightShape
from hetmesh.cost.step_costs import StageCost, StepCosts, TransferCost
from hetmesh.cost.work import Work, imbalance, lane_work, sample_work, total_work

__all__ = [
    "MACHINES",
    "Flops",
    "LayerShape",
    "Machine",
    "ModuleShape",
    "StageCost",
    "StaticMemory",
    "StepCosts",
    "TransferCost",
    "WeightShape",
    "Work",
    "find_machine",
    "imbalance",
    "lane_work",
    "layer_flops",
    "load_machine",
    "module_flops",
    "sample_work",
    "static_memory",
    "total_work",
]
