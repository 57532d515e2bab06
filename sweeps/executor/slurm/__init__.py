"""SLURM: the executor whose members are jobs of a cluster, and what runs on the cluster's nodes.

On the login node `executor` follows jobs: `submitter` has `submission` freeze what is to run and asks `scheduler` to
submit it, which `handover` does through submitit; `ending` says why a job has ended. On a compute node submitit calls
`job`, which runs one member and leaves `attempts` behind; `job_artifacts` is what `ending` finds of a job. The two
sides meet in the study's directory only, which both must see.

    executor -> submitter -> submission -> Request -> scheduler -> handover -> submitit -> sbatch
        ^                                                 |                                   |
        +- ending <- attempts, artifacts, queue ----------+    job.run_member <- submitit <---+
"""
