"""SLURM executor: members run as jobs of a cluster. Also the code that runs on the cluster's nodes.

On the login node `executor` follows jobs. `submitter` lets `submission` freeze the members and asks `scheduler` to
submit them, which `handover` does through submitit. `ending` finds out why a job ended. On a compute node submitit
calls `job`, which runs one member and writes its `attempts` record; `job_artifacts` lists the files that a job left.
The two sides communicate only through the study's directory, which both must see.

    executor -> submitter -> submission -> Request -> scheduler -> handover -> submitit -> sbatch
        ^                                                 |                                   |
        +- ending <- attempts, artifacts, queue ----------+    job.run_member <- submitit <---+
"""
