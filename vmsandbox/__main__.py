"""Lets ``python -m vmsandbox`` do what ``vmsandbox`` does."""

from vmsandbox.cli import program

if __name__ == "__main__":
    program()
