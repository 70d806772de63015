from vmsandbox.api import inspect as inspect
from vmsandbox.api import review_by as review_by
from vmsandbox.api import verify as verify
from vmsandbox.batch import run_batch as run_batch

__version__: str
