"""Lets ``python -m vmsandbox`` do what ``vmsandbox`` does."""

from vmsandbox.cli import main

if __name__ == "__main__":
    main()
