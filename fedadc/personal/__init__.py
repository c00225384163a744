"""Personalization: a model for every client, calibrated after training or stored by the method, and its accuracy."""

from fedadc.personal.folder import personal_state_dict
from fedadc.personal.personalize import PersonalizationResult, personalize

__all__ = ["PersonalizationResult", "personal_state_dict", "personalize"]
