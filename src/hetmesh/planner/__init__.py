"""Which layout, placement and schedule a model should have: sizes, machine and samples in, predictions out."""

from hetmesh.planner.layout_plan import PLACEMENTS, LayoutPlan, ModulePlan, laid_out
from hetmesh.planner.macro_batch import MacroBatch, certify, sample_flops
from hetmesh.planner.predict import Prediction, Predictor, plan_fit
from hetmesh.planner.problem import ModuleFacts, Problem
from hetmesh.planner.search import Found, candidates, search
