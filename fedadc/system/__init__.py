"""Operating-system helpers: deterministic torch settings, processes, signals, crash-safe files, user code."""
