"""Presentation of fits and decisions: HTML report, figures, tables, text and MLflow artifacts."""
