"""Loading of curves from the user's sources: runs, tables, other frameworks' logs, W&B and MLflow.

`readers` lists the readers of files in the order they are tried. A new format is one module and one line there.
"""

from sweeps.source.collected import LoadedStudy
from sweeps.source.load import load

__all__ = ["LoadedStudy", "load"]
