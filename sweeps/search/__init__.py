"""Races and searches, in which a decider chooses, while a study runs, which members run next and which stop.

`race` runs a race. At given amounts of compute it takes a *look* (`decide/race.py`): it compares the curves so far and
stops recipes that will probably not be best. `optuna_search` runs a search, whose trials `trials` stores. `looks` is a
race for runs without a controller. `race_log` reads the record of a race, `race.jsonl`. `settings` is checked before
anything runs. To add a decider, write a class with the methods of `launch.decider.Decider`, and add a case in
`deciders`.

May import: `decide`, `launch`.
"""
