"""Verifiers of completions and the processes in which they run.

`grade` has the records: a sample and its outcome. `verification` has the settings, and starts verifiers in this process
(`inline`) or in worker processes (`pool`, `worker`); a single attempt is in `grade_once`. The graders are `mathematics`
(with `answers`, `spelling`, `words`), `text`, `programs` (run in the sandbox) and `rewards` (functions from the user).
`registry` finds them by name. Nothing here needs torch.
"""
