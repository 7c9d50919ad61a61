"""`python -m hetmesh`: what the command `hetmesh` does, for launchers that start modules.

torchrun --nproc-per-node 4 -m hetmesh train RECIPE
"""

import sys

from hetmesh.cli import main

if __name__ == "__main__":
    sys.exit(main())
