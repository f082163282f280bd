"""Policies: what they are, the built-in ones, and how they reach runners."""
