"""Admission, placement and cleanup: one detached actor for a cluster."""
