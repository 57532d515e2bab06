"""Read and write one run's directory: journal, identity, lease and files. Used by training and by the study tool.

This is the only subpackage of `sweeps` that training imports. Put code here if both training and the study tool need
it. Write files with the module `files`, which writes atomically, and reads and writes JSON lines.

    identity    spec (a run's specification and its hash), provenance (code version), trust
    journal     journal (`metrics.jsonl`), tail (incremental reading), repair (a broken line), passes, rollouts
    writing     lease and writer (one process at a time), files, fields
    a live run  interruption (a request to stop), activity (a run that hangs), gpu
    a live run  interruption (a request to stop), activity (end a run that hangs), gpu
    reading     progress (steps so far), health (choices without effect)

May import: the modules directly in `sweeps/` (`errors`, `redact`, ...).
"""
