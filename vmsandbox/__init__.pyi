from vmsandbox.batch import run_batch as run_batch

__version__: str
