"""What methods and objectives may see: a client's round, the server's round, a run's settings. Nothing else."""
