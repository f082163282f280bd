"""The public door: HTTP and MCP on one port."""
