"""Engines, which create sandboxes: one contract, and a package for each engine."""
