"""The settings of a run: reading YAML, checking it into dataclasses, and building the federation."""
