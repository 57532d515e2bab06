"""Launch of a study: members are planned, submitted, followed, retried and recorded, until each has ended.

In come specifications and launch settings, or a study's folder; out go the ledger, and members' processes or jobs.

    cli.launchers -> settings.prepare_study -> Study.prepare     takes the lease and checks; nothing is written yet
                  -> Controller.commit                           runs until all have ended; what is refused is undone
                       read     executor.poll, journals, node_blacklist, decider
                       decide   decisions                        pure functions
                       record   ledger, specifications           before anything is done or told
                       act      executor.submit, executor.stop
                       tell     observer: progress, MLflow

One controller at a time holds the lease. Members on a cluster outlive it; the next one finds them by the ledger.
"""
