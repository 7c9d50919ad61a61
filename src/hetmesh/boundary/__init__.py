"""Tensors from one module's mesh to another's: plans carried out over torch.distributed."""

from hetmesh.boundary.backend import Backend, Nccl
from hetmesh.boundary.log import CommunicationLog, Label, Message
from hetmesh.boundary.plan_exchange import Exchange
from hetmesh.boundary.redistribute import abandon, backward, redistribute
from hetmesh.boundary.world import World, device_mesh, init
