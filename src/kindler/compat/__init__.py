"""The interfaces of other systems, thinly translated: change an import line, and a program of theirs runs.

Their modules are the distribution kindler-compat. A wheel puts them into this very folder; in a checkout, or
in editable mode, they are in another folder `kindler/compat` on the path, which is added here.
"""

import os
import sys
from importlib.util import find_spec

from kindler.errors import MissingExtraError

for _entry in sys.path:
    _folder = os.path.join(_entry, "kindler", "compat")
    if os.path.isfile(os.path.join(_folder, "plugin.py")):
        __path__.append(_folder)
        break
if find_spec("kindler.compat.plugin") is None:
    raise MissingExtraError(what="kindler.compat", package="kindler-compat", extra="compat")
