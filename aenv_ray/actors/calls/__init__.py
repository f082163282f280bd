"""A call on its way from a handle to a host."""
