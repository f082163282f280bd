"""Reached by a relative import."""

NAME = "parts"
