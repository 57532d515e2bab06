"""One optimizer step on a batch: forward passes before the update, advantages per token, and the terms of the loss.

`before` makes the passes without gradient (anchor, reference, values), `token_credit` computes advantages per token,
`terms` is the loss as a list of terms, `loss_scale` handles FP16 and non-finite updates, `health` ends runs that have
collapsed. To add a term, write a function in `terms` and an axis that gives its coefficient.

May import: `model`, `task`, `choices`, never `stream`.
"""
