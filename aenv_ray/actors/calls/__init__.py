"""Calls from a handle, or from a process with many calls, to a host."""
