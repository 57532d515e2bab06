"""Run other trainers' commands as members of a study: start them, follow their metrics, and write journals.

The input is a user's configuration (conf/command/base/command.yaml has its keys). The output is specifications for a
launch and, in a member's process, a journal in our format, so that all readers of journals work on it.

    plan.make_specs     settings (checked), template (values into words and files) -> RunSpec
    runner.run_member   sweeps.process.Tree: the command, and a clean end of all processes that it has started
                        metrics.Source: new metrics since the last poll (growing: JSON lines, CSV)
                        follow.Follower: metrics -> journal
"""
