"""Context-parallel attention: plan of tiles, fetch of keys and values, kernels, and its place in models."""

from hetmesh.attention.packed_rows import attend
