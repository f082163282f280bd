"""An environment project on disk: config, files, archive and references."""
