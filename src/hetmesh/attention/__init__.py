"""Context-parallel attention: plan of tiles, fetch of keys and values, kernels, and its place in models."""

from hetmesh.attention.in_models import attend
