"""Recipes from the settings of TRL and verl."""
