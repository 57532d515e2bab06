"""Searches and races: conductors that decide while a study runs which members run next and which stop."""
