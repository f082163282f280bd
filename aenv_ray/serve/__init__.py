"""The gateway: the door for clients outside the cluster. One Ray Serve application."""
