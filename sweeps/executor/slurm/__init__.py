"""Run members as jobs of a SLURM cluster.

On the login node, `executor` follows the jobs. `submitter` submits members in batches: `submission` writes the files
that the jobs need, and `scheduler` calls SLURM, through `handover` and submitit. `ending` finds out why a job ended,
from SLURM's answer, the job's attempt record, and the files that the job left (`job_artifacts`). On a compute node,
submitit calls `job`, which runs one member through `node.entry`.

    executor -> submitter -> submission -> Request -> scheduler -> handover -> submitit -> sbatch
        ^                                                 |                                   |
        +- ending <- attempts, artifacts, queue ----------+    job.run_member <- submitit <---+
"""
