"""The actor that owns instances, and what it decides with."""
