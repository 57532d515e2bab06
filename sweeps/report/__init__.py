"""Present fits and decisions: HTML report, figures, tables, text and MLflow artifacts.

`write` makes the files. `page` fills `templates/` (Jinja2, autoescaping), and a section of the page is a block in
`templates/page.html`. `figures` and `drawing` plot. The `*_text` modules print for a terminal, `plain` without one.
`publish` sends results to MLflow.

May import: `decide` and everything below it.
"""
