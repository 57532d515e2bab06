"""Environments, such as tools or games, with which a model has a conversation of several turns.

Environments run in separate processes, so this package does not import torch. Its modules are:

    protocol    records of a conversation (turns, observations), and the protocol that environments have here
    forms       adapters from the user's classes, in TRL's form or in text form, to that protocol
    calls       conventions by which models write tool calls, and their parsers
    processes   pool and worker: one instance per rollout, in a killable process

`model.turns` checks whether a chat template can be used over several turns.
"""
