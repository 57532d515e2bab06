"""One run's directory: journal, identity, lease, files. All that training and study share."""
