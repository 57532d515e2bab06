"""Study tool: run identity, journals, launches, curve fits, rankings and reports. Needs no torch."""

# Version of both distributions that are built from this repository; both pyproject.toml files read it here.
__version__ = "0.3.0"
