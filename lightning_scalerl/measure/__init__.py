"""Measurements of a run.

`compute_meter` counts FLOPs (`flops`) and device hours, `heartbeat` keeps its totals on disk. `step_metrics` are the
metrics of a training step, `mechanism` counts the steps in which a variant's choice had an effect, `probe` compares
trainer and generator, `truncation_alarm` warns. `semantics` records all settings of a run, with defaults filled in.
`memory` predicts the memory of a run.
"""
