"""Several ranks around one rollout stream, and how a process finds its rank.

`start` reads the launch environment and `meeting` connects the ranks. `ranks` shares, sums and gathers data.
`sharded` is the FSDP2 strategy, `checkpoint_folder` and `shard_files` its checkpoints in parts.

Of the other packages here it imports only the lowest floor of the import order (`FLOORS` in tests/test_imports.py).
"""
