"""The public face for text: prefixes to texts, long text, ranking, n-best lists."""
