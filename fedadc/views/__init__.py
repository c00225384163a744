"""All that methods and objectives can see: a client's view, the server's view, and a run's settings."""
