"""The tests, in three layers: what a test may touch is said by the folder it lies in."""
