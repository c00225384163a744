"""Models of the clients' own: calibrated after training, or kept by a method; and what they are worth."""
