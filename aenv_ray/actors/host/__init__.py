"""The actor that owns instances, and the classes that decide for it."""
