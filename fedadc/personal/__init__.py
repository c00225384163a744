"""Personalization: a model for every client, calibrated after training or stored by the method, and its accuracy."""
