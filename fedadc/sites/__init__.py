"""Real federations: the server's half and the sites' halves of a run, on Flower. Only `flower.py` imports Flower."""
