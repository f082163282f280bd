"""The gateway's data path: MCP, functions, files and ports of instances."""
