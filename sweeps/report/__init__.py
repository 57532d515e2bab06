"""Fits and decisions -> page, figures, tables, text, MLflow artifacts."""
