"""Launch of a study: members are planned, submitted, monitored, retried and recorded, until each has ended.

Input: specifications and launch settings, or a study's folder. Output: the ledger, and members' processes or jobs.

    cli.launchers -> settings.prepare_study -> Study.prepare     takes the lease and checks; writes nothing yet
                  -> Controller.commit                           runs until all have ended; a refused launch is undone
                       read     executor.poll, journals, node_blacklist, decider
                       decide   decisions                        pure functions
                       record   ledger, specifications           before any action or notification
                       act      executor.submit, executor.stop
                       notify   observer: progress, MLflow

One controller at a time holds the lease. Members on a cluster outlive it; the next controller finds them by the ledger.
"""
