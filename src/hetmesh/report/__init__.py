"""Views of recipes as text, PNG and JSON. What is shown is a frozen value; how it is shown is a function of it.

values.py   RecipeView, ModuleView, BoundaryView
explain.py  a recipe -> RecipeView, in one process, without weights
text.py     RecipeView -> lines
picture.py  RecipeView -> PNG (matplotlib, the extra `report`)
"""

from hetmesh.report.explain import explain
from hetmesh.report.picture import save_picture
from hetmesh.report.text import as_text
from hetmesh.report.values import BoundaryView, ModuleView, RecipeView

__all__ = ["BoundaryView", "ModuleView", "RecipeView", "as_text", "explain", "save_picture"]
