"""Searches and races: deciders that decide while a study runs which members run next and which stop."""
