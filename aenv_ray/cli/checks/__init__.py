"""What `aenv doctor` checks."""
