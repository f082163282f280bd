"""The gateway: REST, MCP and functions for clients outside the cluster."""
