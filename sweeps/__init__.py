"""Study tool: run identity, journals, launches, curve fits, rankings and reports. Needs no torch."""

# Of both distributions that are built from this repository: hatch_build.py, and pyproject.toml beside this file.
__version__ = "0.2.0"
