"""What several adapters need: tools as frameworks call them, schemas, token loops, versions."""
