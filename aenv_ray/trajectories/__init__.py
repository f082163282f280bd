"""Trajectories as data: the schema of episodes, their files, and their statistics."""
