"""What is kept: one protocol (`base`), two engines that own their SQL (`sqlite`, `postgres`)."""
