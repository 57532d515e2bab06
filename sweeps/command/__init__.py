"""Members that are commands: any trainer's run, started, followed and journalled as one of ours.

In comes a configuration of a user's (conf/command/base/command.yaml says what it holds), out go specifications for a
launch, and in a member's process a journal like that of our own runs, so that all that reads journals works on it.

    plan.make_specs     settings (checked), template (values into words and files) -> RunSpec
    runner.run_member   sweeps.process.Tree: ends all that the command started
                        metrics.Source reads what the command has logged since the last look (growing: JSON lines, CSV)
                        follow.Follower: metrics -> journal
"""
