"""Loading of curves from the user's sources: runs, tables, other frameworks' logs, MLflow.

`readers` lists the readers in the order they are asked; adding a format is one module and one line there.
"""

from sweeps.source.collected import LoadedStudy
from sweeps.source.load import load

__all__ = ["LoadedStudy", "load"]
