"""E(c, x): one number per continuation, low where text is likely."""
