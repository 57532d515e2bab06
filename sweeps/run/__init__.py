"""One run's directory: journal, identity, lease and files, shared by training and the study tool.

This is the only room of `sweeps` that training imports. A file that both sides need belongs here and is written through
`files`, which has the one atomic writer and the one reader and writer of JSON lines.

    identity    spec (frozen specification and its hash), provenance (code version), trust
    journal     journal (`metrics.jsonl`), tail (incremental reading), repair (a broken line), passes, rollouts
    writing     lease and writer (one process at a time), files, fields
    a live run  interruption (a request to stop), activity (a run that hangs), gpu
    a job       job (of any cluster), slurm_job (`SLURM_*`)
    reading     progress (steps so far), health (choices without effect)

May import: the modules of the ground (`errors`, `redact`, ...).
"""
