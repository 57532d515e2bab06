"""SLURM: the executor whose members are jobs of a cluster, and what runs on the cluster's nodes.

On the login node `executor` has `submission` freeze what is to run and asks `scheduler` to submit it and how it goes;
`handover` submits, through submitit. On a compute node submitit calls `job`, which runs one member and leaves
`attempts` behind; `remains` is what the executor finds of a job. The two sides meet in the study's directory only,
which both must see.

    executor -> submission -> Request -> scheduler -> handover -> submitit -> sbatch
        ^                                   |                                    |
        +---- attempts, remains, queue -----+      job.run_member <- submitit <--+
"""
