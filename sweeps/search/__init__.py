"""Searches and races: what decides, while a study runs, what is run next and what is run no further."""
