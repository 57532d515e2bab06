"""Races and searches: deciders that decide, while a study runs, which members run next and which stop.

`race` conducts a race by the looks of `decide/race.py`. `optuna_search` conducts a search over the trials of `trials`.
`run_observer` is for a run without a controller. `race_log` reads and writes `race.jsonl`, `settings` is checked before
anything runs. A new decider is a class with the methods of `launch.decider.Decider` and a case in `deciders`.

May import: `decide`, `launch`.
"""
