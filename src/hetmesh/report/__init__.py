"""Views of recipes and runs as text, PNG, JSON and HTML: what is shown is a frozen value."""

from hetmesh.report.explain import explain
from hetmesh.report.picture import save_picture
from hetmesh.report.text import as_text
from hetmesh.report.values import BoundaryView, ModuleView, RecipeView
