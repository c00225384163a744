"""Trained models: loading them from a run, predicting new data, and exporting them."""
