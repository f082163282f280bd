"""Measures the performance budget: each figure against its floor, in one run on one machine."""
