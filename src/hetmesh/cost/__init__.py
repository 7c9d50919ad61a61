"""What a step costs, computed from sizes alone: FLOPs, seconds, memory; and where to cut a chain of layers."""

from hetmesh.cost.activations import activation_bytes
from hetmesh.cost.fitted import Coefficients, HeldOut, Observation, Profile, fit, layer_kind
from hetmesh.cost.flops import Flops, layer_flops, module_flops
from hetmesh.cost.layer_options import LayerOptions
from hetmesh.cost.layer_time import LayerTime, Rates, layer_time, module_times, upstream_flags
from hetmesh.cost.machine import MACHINES, Machine, find_machine, load_machine, machine_toml
from hetmesh.cost.shapes import LayerShape, ModuleShape, WeightShape
from hetmesh.cost.stage_cuts import partition
from hetmesh.cost.static_memory import StaticMemory, module_memory, static_memory
from hetmesh.cost.step_costs import Lanes, Parts, StageBytes, StageCost, StageParts, StepCosts, TransferCost
from hetmesh.cost.work import Work, computed_work, imbalance, sample_work, total_work
