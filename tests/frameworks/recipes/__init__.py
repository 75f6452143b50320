"""Tests of what docs/integrations/recipes.md shows."""
