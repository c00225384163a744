"""The command line interface: parse arguments, call the package, show results."""
