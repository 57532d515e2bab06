"""Run members on this machine or on a cluster, and report how each of them ended.

`base` has the protocol of executors, with `Launch` and `Outcome`. `local` runs members as child processes or in this
process. `clusters` lists the kinds of cluster, one of which is `slurm/`. `node/` is the code that runs on the nodes of
any cluster. `failure` lists the kinds of failure, and `error_signatures` the messages that identify them.

To add a kind of cluster (docs/guide/cluster.md has the files, tests/sweeps/executor/folder_cluster.py is a short
example):

1. a folder with a class like `clusters.Cluster`, and an entry in `clusters.CLUSTERS`;
2. on a node, a call of `node.entry.run_task` with facts about the job (`sweeps.run.job.Job`);
3. for `cluster=NAME`: `conf/hydra/launcher/scalerl_NAME.yaml` with `kind: NAME` and
   `_target_: hydra_plugins.scalerl_launcher.ScaleRLClusterLauncher`, and `conf/cluster/NAME.yaml`, which selects it;
4. a test class that inherits `ExecutorContract` (tests/sweeps/executor/contract.py), the contract of all executors but
   `debug`.

A new kind of failure needs an entry in `failure.KINDS`, a retry policy in `conf/hydra/launcher/scalerl_slurm.yaml`, and
messages in `error_signatures` or a case in `slurm/ending.why_ended`.

May import: `run`.
"""
