"""Study tool: run identity, journals, launches, curve fits, rankings and reports. Needs no torch."""

# Version of both distributions built from this repository. Both pyproject.toml files read it here.
__version__ = "0.3.0"
