"""How vectors travel between server and clients: bytes and virtual time."""
