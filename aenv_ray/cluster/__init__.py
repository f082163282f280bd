"""Clusters on Kubernetes: renders, applies, checks and deletes their manifests, without kubectl."""
