"""Networks that map a context to logits: of text, of translations, of images."""
