"""Running calls: dispatch, the memory of call ids, and the fast door in front of it."""
