"""Protocol between a study and the nodes of a cluster of any kind. Both sides must see the study's directory.

`manifest` is written before members are submitted. On a node the cluster's own folder calls `entry.run_task`, which
runs one member and writes its `attempts` record. `ending` reads from that record and the logs why a job ended.
"""
