"""A run under Lightning's Trainer, all but its training step: set-up, data path, continuation, checkpoints, records.

In come the module's arguments, and with each `Trainer.fit` or `Trainer.validate` its callbacks, data module and perhaps
a checkpoint. Out go a module that is ready for `ScaleRL.training_step`, checkpoints, and records for callbacks and
loggers. `ScaleRL` holds all parts; each of its hooks is a line that calls one of these files:

    __init__                       models            arguments -> policy, tokenizer, recipe
                                     trials            is its head known, does it take packed rows?
    setup                          setup             choices -> critic, reference, terms of the loss
                                     memory            does it fit into its device?
                                     sampling          task, chat -> prompts, a generator, verifiers
                                     data_path         task -> prompts -> stream -> verifiers -> generator -> driver
                                     continuation      the same run as the last fit's, or another?
    configure_model                placement         shard them; streamed: each rank reads its own part of the weights
    on_fit_start ... on_fit_end    fit               probe, first weights, compute meter, stop, failure
    training_step                  step              rank 0's measurements of it: generator's gaps, mechanisms, metrics
    training_step, validation_step records           metrics -> callbacks and loggers (`fit.validate`)
    on_save/on_load_checkpoint     checkpoint_state  state of the run <-> checkpoint
    save_pretrained                export            policy -> folder for `from_pretrained`

`parts` lists what the module holds, for these files to read and to set. With several ranks, rank 0 alone has a data
path.
"""
