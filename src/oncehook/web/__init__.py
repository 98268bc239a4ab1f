"""The HTTP faces: the way in (`ingest`), health and metrics (`health`), and the server that carries them (`server`)."""
