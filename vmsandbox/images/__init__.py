"""Owns images: building them (mmdebstrap, debugfs), verifying, exporting, importing, overlays
(qemu-img).

Knows no guest, no libvirt and no sandbox. `ImageStore` is the room's door.
"""

from vmsandbox.images.bootstrap import Progress
from vmsandbox.images.copying import copy_disk
from vmsandbox.images.recipe import builtin_recipes, recipe_folder
from vmsandbox.images.store import ImageStore

__all__ = ["ImageStore", "Progress", "builtin_recipes", "copy_disk", "recipe_folder"]
