"""SLURM executor: members run as jobs of a cluster.

`executor` has the entry of the registry, and on the login node it follows jobs. `submitter` lets `submission` freeze
the members and asks `scheduler` to submit them, which `handover` does through submitit. `ending` finds out why a job
ended. On a compute node submitit calls `job`, which runs one member by `node.entry`; `job_artifacts` lists the files
that a job left.

    executor -> submitter -> submission -> Request -> scheduler -> handover -> submitit -> sbatch
        ^                                                 |                                   |
        +- ending <- attempts, artifacts, queue ----------+    job.run_member <- submitit <---+
"""
