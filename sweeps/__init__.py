"""Study tool: run identity, journals, launches, curve fits, rankings and reports. Needs no torch."""
