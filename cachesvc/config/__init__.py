"""The daemon's configuration: `model` says what there is, `sources` reads it, `text` writes it."""
