"""Run members on the nodes of any kind of cluster. The nodes share the study's directory with the controller.

`manifest` is written before members are submitted. On a node, the code for the kind of cluster calls `entry.run_task`,
which runs one member and writes its `attempts` record. `ending` finds out from this record and the logs why a job
ended.
"""
