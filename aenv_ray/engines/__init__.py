"""What makes sandboxes: one contract, an engine a file."""
