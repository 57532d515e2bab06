"""Training of one run by several ranks around a single rollout stream.

`start` finds out the rank of this process and its devices, `meeting` connects the ranks and exchanges data, and `ranks`
divides the work of a step. `sharded` is the FSDP2 strategy; `checkpoint_folder` and `shard_files` are its checkpoints.
"""
