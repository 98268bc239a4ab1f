"""Orders, as the shop tells about them."""
