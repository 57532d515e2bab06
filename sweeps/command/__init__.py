"""Members that are commands: runs of any trainer, started, followed and journalled like this project's own runs.

The input is a user's configuration (conf/command/base/command.yaml has its keys). The output is specifications for a
launch and, in a member's process, a journal in our format, so that all readers of journals work on it.

    plan.make_specs     settings (checked), template (values into words and files) -> RunSpec
    runner.run_member   sweeps.process.Tree: ends all that the command started
                        metrics.Source reads new metrics since the last poll (growing: JSON lines, CSV)
                        follow.Follower: metrics -> journal
"""
