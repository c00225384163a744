"""The two loops, rounds and local steps, and the state they carry."""
