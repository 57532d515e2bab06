"""The study: identity, journals, launching, fitting, ranking and reporting. Needs no torch."""
