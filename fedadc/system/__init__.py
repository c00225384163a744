"""What the package needs of the machine: repeatable numbers, processes, signals, files that survive a crash."""
