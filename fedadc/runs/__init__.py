"""One run from a config: trained, written to a run directory, resumed, read back."""
