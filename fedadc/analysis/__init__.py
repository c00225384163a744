"""Many runs together: compared, plotted, run as an experiment."""
