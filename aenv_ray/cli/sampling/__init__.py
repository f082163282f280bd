"""Sampling, evaluation and trajectories: their commands, and what these share and print."""
