"""What is remembered about environments and instances, and where."""
