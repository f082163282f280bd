"""What engines share on a node."""
