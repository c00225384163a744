"""`python -m fedadc` is the command `fedadc`."""

from fedadc.cli.app import main

if __name__ == "__main__":
    main()
