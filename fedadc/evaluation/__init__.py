"""Metrics of models on data that is not for training."""
