from vmsandbox.api import compare as compare
from vmsandbox.api import conflicts as conflicts
from vmsandbox.api import fork as fork
from vmsandbox.api import inspect as inspect
from vmsandbox.api import published_ports as published_ports
from vmsandbox.api import review_by as review_by
from vmsandbox.api import verify as verify
from vmsandbox.api import waiting as waiting
from vmsandbox.batch import discard_batch as discard_batch
from vmsandbox.batch import resume_batch as resume_batch
from vmsandbox.batch import run_batch as run_batch
from vmsandbox.sandbox import read_brief as read_brief

__version__: str
