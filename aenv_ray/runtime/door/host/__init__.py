"""Requests of the runtime to its host, over the connection that the host has opened."""
