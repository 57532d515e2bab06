"""Read and write one run's directory: journal, identity, lease and files; shared by training and the study tool.

This is the only subpackage of `sweeps` that training imports. Put code here if both training and the study tool need
it. Write files with the module `files`, which has the atomic writer, and the reader and writer of JSON lines.

    identity    spec (a run's specification and its hash), provenance (code version), trust
    journal     journal (`metrics.jsonl`), tail (incremental reading), repair (a broken line), passes, rollouts
    writing     lease and writer (one process at a time), files, fields
    a live run  interruption (a request to stop), activity (a run that hangs), gpu
    a job       job (of any cluster), slurm_job (`SLURM_*`)
    reading     progress (steps so far), health (choices without effect)

May import: the modules directly in `sweeps/` (`errors`, `redact`, ...).
"""
