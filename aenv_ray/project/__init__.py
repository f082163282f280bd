"""An environment project on disk: its config, files, archive and references."""
