"""`python -m hetmesh.cli`, for torchrun: `torchrun --nproc-per-node 4 -m hetmesh.cli train RECIPE`."""

import sys

from hetmesh.cli import main

if __name__ == "__main__":
    sys.exit(main())
