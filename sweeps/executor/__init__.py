"""Executors, which run members on this machine or on a SLURM cluster and tell why one ended.

`base` is what they have in common, `local` those of this machine, `slurm` the cluster's; `failure` names the reasons
for an end, and `signs` are what errors and logs show of them.
"""
