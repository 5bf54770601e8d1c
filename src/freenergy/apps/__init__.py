"""Applications of the toolkit; nothing in the core imports them."""
