"""Verifiers, which grade completions, and the processes that they run in.

Graders run in processes without torch, so this package does not import it. A sample and its outcome (score, abstention
or error) are defined in `rollouts.grade`. The modules by topic:

    processes   pool and worker (killable), inline (in the trainer, for trusted graders), grade_once
    settings    verification: timeouts, error rate, the test of the verifiers before the first step
    graders     mathematics (with answers, spelling, words), text, programs (in `sandbox/`), judge (a language model)
    rewards     rewards: the user's functions in TRL's or verl's form; registry: weighted sums of several rewards
"""
