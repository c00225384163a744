"""Several runs together: comparisons, plots, experiments."""
