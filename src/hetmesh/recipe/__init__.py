"""Recipes: a TOML file in torchtitan's vocabulary as one frozen, checked value. Pure: no model is built."""
