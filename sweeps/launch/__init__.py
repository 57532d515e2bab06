"""A study until it is done: its ledger, its controller, its settings, its status, and who is told."""
