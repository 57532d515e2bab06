"""Run other trainers as members of a study: start the trainer's command, follow its metrics, and write a journal.

The input is a user's configuration (conf/command/base/command.yaml has its keys). The output is specifications for a
launch and, in the process of each member, a journal in our format, which all readers of journals accept.

    plan.make_specs     settings (checked), template (values into words and files) -> RunSpec
    runner.run_member   sweeps.process.Tree: start the command, and end all processes that it has started
                        metrics.Source: read new metrics at each poll (growing: JSON lines, CSV)
                        follow.Follower: metrics -> journal
"""
