"""E(c, x): one number a continuation, low where text is likely."""
