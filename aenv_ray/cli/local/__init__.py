"""Processes on this machine that commands start: a Ray, a server."""
