"""A run under Lightning's Trainer, except its training step: setup, data path, continuation, checkpoints, records.

The inputs are the module's arguments and, for each `Trainer.fit` or `Trainer.validate`, its callbacks, data module and
perhaps a checkpoint. The results are a module that is ready for `ScaleRL.training_step`, checkpoints, and records for
callbacks and loggers. `ScaleRL` holds all parts. Each of its hooks calls one of these files:

    __init__                       models            arguments -> policy, tokenizer, recipe
                                     trials            is the model's head supported, does it take packed rows?
    setup                          setup             choices -> critic, reference, terms of the loss
                                     memory            does it fit into its device?
                                     sampling          task, chat -> prompts, a generator, verifiers
                                     data_path         task -> prompts -> stream -> verifiers -> generator -> driver
                                     continuation      does this fit continue the last fit's run?
    configure_model                placement         shard the models; `streamed`: each rank reads its part of them
    on_fit_start ... on_fit_end    fit               probe, first weights, compute meter, stop, failure
    training_step                  step              rank 0's measurements: gaps to the generator, mechanisms, metrics
    training_step, validation_step records           metrics -> callbacks and loggers (`fit.validate`)
    on_save/on_load_checkpoint     checkpoint_state  state of the run <-> checkpoint
    save_pretrained                export            policy -> folder for `from_pretrained`

`parts` declares the module's attributes that these files read and set. With several ranks, only rank 0 has a data path.
"""
