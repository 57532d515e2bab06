"""Decisions from fits: ranking, planning, the next run, racing, model sizes, and following a live study.

    standing   joint posterior of all recipes, and the choice that it implies; the modules below use it
    ranking    rank, from efficiency (ratios of compute, ties), reward and resolution; wording writes the sentences
    planning   plan, from reach (compute to a target), next_run, sizes, power_law, across_sizes and rollout_counts;
               design plans before a launch
    comparing  pairwise (two recipes), effects (axes of a grid), by_axis (other compute axes), signal (which evaluation
               set decides), aggregate (several sets)
    live       race, with its stopping rules in rules; watch and live_ranking, for a running study

May import: `fit`, `source`.
"""
