"""Decisions from fits: ranking, planning, the next run, racing, model sizes, and following a live study.

    standing   joint posterior of all recipes, and the choice that it implies; the modules below use it
    rank       the ranking; efficiency (ratios of compute, ties), reward, resolution; wording puts them into sentences
    plan       reach (compute to a target), next_run, sizes, power_law, across_sizes, rollout_counts; design (before a
               launch)
    compare    pairwise (two recipes), effects (axes of a grid), by_axis (other compute axes), signal (which evaluation
               set decides), aggregate (several sets)
    live       race by the rules of rules; watch, live_ranking

May import: `fit`, `source`.
"""
