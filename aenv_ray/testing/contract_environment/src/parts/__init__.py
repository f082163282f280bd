"""A package of the project, for imports inside it."""
