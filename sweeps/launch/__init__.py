"""Launch of a study: plan its members, submit, follow, retry and record them, until each has ended.

The input is specifications and launch settings, or a study's folder. The output is the ledger, and the members'
processes or jobs.

    cli.launchers -> settings.prepare_study -> Study.prepare     takes the lease and checks; nothing is written yet
                  -> Controller.commit                           runs until all have ended; a refused launch is undone
                       read     executor.poll, journals, node_blacklist, decider
                       decide   decisions                        pure functions
                       record   ledger, specifications           before anything is done or reported
                       act      executor.submit, executor.stop
                       report   observer: progress, MLflow

One controller at a time holds the lease. Members on a cluster outlive it; the next controller finds them by the ledger.

`planning` composes members in a process that ends, `labels` checks that a label belongs to one curve, `rollback` undoes
a refused launch, `decider` is the protocol of races and searches. An observer is a subclass of `observer.Observer` that
overrides the methods it needs.

May import: `executor`, `run`, `tracking`.
"""
