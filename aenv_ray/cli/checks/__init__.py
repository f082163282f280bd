"""The checks of `aenv doctor`."""
