"""Running a study to its end: ledger, controller, launch settings, status, and observers."""
