"""Executors, which run members on this machine or on a SLURM cluster and tell why one ended.

Of a cluster: on the login node `slurm` submits what `submission` has frozen and asks `scheduler` how it goes; on a
compute node `job` runs one member and leaves `attempts` behind. The two meet in the study's directory only, which both
must see.
"""
