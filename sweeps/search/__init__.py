"""Races and searches: deciders that choose, while a study runs, which members run next and which stop.

`race` runs a race by the looks of `decide/race.py`. `optuna_search` runs a search over the trials of `trials`.
`looks` is for runs without a controller. `race_log` reads and writes `race.jsonl`. `settings` is checked before
anything runs. A new decider is a class with the methods of `launch.decider.Decider` and a case in `deciders`.

May import: `decide`, `launch`.
"""
