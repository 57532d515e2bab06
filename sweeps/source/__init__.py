"""Load curves from the user's sources: runs, tables, other frameworks' logs, MLflow.

`load` is the entry point, and `places` determines what kind of source a path is. `readers` lists the readers of file
formats in the order in which they are tried. `frame` reads any table into a pandas DataFrame. All readers share
`cells`, `columns`, `text`, `log` and `collected`.

To add a format, write a module with `matches` and `read`, and add a line to `readers` (docs/reference/sources.md has an
example). To add the metric names of another framework, add an entry to `vocabulary`. A reader never guesses silently:
the `source:` line that it prints states how each column is used.

May import: `run`, `curve`, `tracking`.
"""

from sweeps.source.collected import LoadedStudy
from sweeps.source.load import load

__all__ = ["LoadedStudy", "load"]
