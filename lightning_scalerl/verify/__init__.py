"""Verifiers, which grade completions, and the processes that they run in.

Graders run in separate processes, so this package does not import torch. Its modules are:

    request     a sample and its outcome: score, abstention or error (`rollouts.grade`)
    processes   pool and worker (killable), inline (in the trainer, for trusted graders), grade_once
    settings    verification: timeouts, error rate, the test of the verifiers before the first step
    graders     mathematics (with answers, spelling, words), text, programs (in `sandbox/`)
    rewards     the user's functions in TRL's or verl's form; registry combines several with weights
"""
