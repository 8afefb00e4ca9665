"""Communication backends, one folder each."""
