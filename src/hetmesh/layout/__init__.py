"""Layouts as values, and the plans that turn one into another. Pure: no communication, no tensors of data."""

from hetmesh.layout.intervals import Interval, Intervals
from hetmesh.layout.layout import Layout
from hetmesh.layout.mesh import MeshSpec
from hetmesh.layout.placements import Placement, RowSplit
from hetmesh.layout.transfer import Piece, TransferPlan, TransferStep, missing_elements, plan_gradient, plan_transfer
