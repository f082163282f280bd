"""The gateway's control routes."""
