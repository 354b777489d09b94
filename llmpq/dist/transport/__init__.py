"""Messages between ranks: frames, connections, topology."""
