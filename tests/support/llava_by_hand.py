"""A directory of LLaVA whose modules a recipe names one by one."""

_TEXT = """
[modules.vision]
model = "{tower}"
initial_load_path = "{path}"
{vision}
[modules.projector]
model = "mlp"
{projector}
[modules.llm]
model = "llama"
initial_load_path = "{path}"
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[data]
source = "hetmesh.testing.sources:RandomMedia"
options = {{ kinds = {{ image = [3, 8, 8] }} }}
"""


def llava_by_hand(path, tower="clip", vision="config = { feature_layer = -2 }", *, whole=True):
    """The text of the recipe; `whole`: the projector has its weights from the directory too, else it is not LLaVA's."""
    projector = f'initial_load_path = "{path}"' if whole else "config = { hidden_features = 9 }"
    return _TEXT.format(path=path, tower=tower, vision=vision, projector=projector)
