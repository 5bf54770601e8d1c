"""Text in, windows of tokens out."""
