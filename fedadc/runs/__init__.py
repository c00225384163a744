"""Run directories: training from a config, checkpoints, resuming, and reading the results."""
