"""The store: one protocol (`base`), two engines with SQL of their own (`sqlite`, `postgres`)."""
