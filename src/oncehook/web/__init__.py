"""HTTP: receiving (`hooks`, `connection`, `asgi`), health and metrics (`health`), API, dashboard, and the server."""
