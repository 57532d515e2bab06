"""The directory of one run: journal, identity, lease and other files, shared by training and the study tool."""
