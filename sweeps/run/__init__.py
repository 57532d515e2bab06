"""One run's directory: journal, identity, lease and files, shared by training and the study tool."""
