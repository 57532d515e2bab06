"""Members as jobs of a SLURM cluster: submitted, found again, requeued, and judged by what is known about their end.

On the login node, `executor` submits what `submission` has frozen and asks `scheduler` how it goes; on a compute node,
`job` runs one member and leaves `attempts` behind. The two meet in the study's directory only, which both must see.
"""
