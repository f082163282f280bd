"""The programs that run as process 1 of a container or pod, and in its sidecar."""
