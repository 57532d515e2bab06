"""Fits -> a ranking, a plan, what to run next, model sizes, a watch over what comes."""
