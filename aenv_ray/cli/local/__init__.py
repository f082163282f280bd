"""Processes that commands start on this machine: a Ray, a server."""
