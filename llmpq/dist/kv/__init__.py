"""Keys and values of running requests: cache, storage, transfer between ranks."""
