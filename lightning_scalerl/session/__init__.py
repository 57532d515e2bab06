"""A run under Lightning's Trainer, except its training step: setup, data path, continuation, checkpoints, records.

`ScaleRL` is composed of five objects that own their state. Each function of these files receives the objects that it
uses, and never the module itself:

    Models              models             policy, critic, reference, tokenizer; the ranks and device that train them
    DataPath            data_path          rank 0: task -> prompts -> stream -> verifiers -> generator -> driver
    Updates             updates            optimizer, learning rates, loss scale, skipped updates, health
    Records             records            metrics -> callbacks and loggers
    Continuation        continuation       decides whether this fit continues the last fit's run

A `Stage` holds the inputs of one fit, validation or prediction (recipe, choices, models, task, seed). A fit builds a
`DataPath` from it. An evaluation builds only a `Sampling` (prompts, generator, verifiers).
The hooks of `ScaleRL` call the other files:

    __init__                       models            arguments -> recipe, `Models`
                                     trials            check that the model's head is supported; try packed rows
    setup                          setup             callbacks -> choices -> models on their device -> `DataPath`
                                     placement         adapt, check, move and shard the models
                                     streamed          each rank reads its part of the weights
                                     memory            check that the models fit into the device's memory
    configure_model                placement         shard the models
    on_fit_start, on_train_start   fit               probe of the generator
    next_batch                     fit               stop between steps, exhausted prompts
    training_step                  step              rank 0's measurements: gaps to the generator, mechanisms, metrics
    on_save/on_load_checkpoint     checkpoint_state  state of the run <-> checkpoint
    save_pretrained                export            policy -> folder for `from_pretrained`
"""
