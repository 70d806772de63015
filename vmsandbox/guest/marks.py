"""Owns finding a sequence of bytes in a stream that comes in pieces. Pure."""


def overlap(data: bytes, mark: bytes) -> int:
    """How many bytes at the end of `data` may be the beginning of `mark`, which is not in it."""
    longest = min(len(data), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if data.endswith(mark[:size])), 0)
