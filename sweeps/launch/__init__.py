"""Launch a study: plan its members (one run per recipe and seed), submit them, follow, retry and record them.

Input: the members' specifications and the launch settings, or the folder of an existing study. Output: the ledger, and
the members' processes or jobs.

    cli.launchers -> settings.prepare_study -> Study.prepare     takes the lease and checks; nothing is written yet
                  -> Controller.commit                           runs until all have ended; a refused launch is undone
                       read     executor.poll, journals, node_blacklist, decider
                       decide   decisions                        pure functions
                       record   ledger, specifications           before anything is done or reported
                       act      executor.submit, executor.stop
                       report   observer: progress, MLflow

One controller at a time holds the study's lease. Cluster jobs keep running after their controller has ended; the next
controller finds them in the ledger.

`planning` composes members in a short-lived process, `labels` checks that a label belongs to one curve, `rollback`
undoes a refused launch, `decider` is the protocol of races and searches. To add an observer, subclass
`observer.Observer` and override the methods it needs.

May import: `executor`, `run`, `tracking`.
"""
