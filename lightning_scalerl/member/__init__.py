"""Members of a study: which they are, and one of them run."""
