"""Several ranks around one rollout stream, and how a process learns which of them it is."""
