"""Present fits and decisions: HTML report, figures, tables, text and MLflow artifacts.

`write` makes the files of a report. `page` fills `templates/` (Jinja2, autoescaping); each section of the page is a
block in `templates/page.html`. `figures`, `overlay`, `forest`, `frontier` and `prompts_figure` plot with the functions
of `drawing`. The `*_text` modules format text for a terminal, with the tables of `plain`; `watch_screen` is the live
screen. `publish` sends results to MLflow.

May import: `decide` and everything below it.
"""
