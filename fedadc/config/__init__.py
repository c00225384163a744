"""A run's settings: from a YAML file to checked dataclasses and to a federation."""
