"""Clusters on Kubernetes: their manifests, and bringing them up and down without kubectl."""
