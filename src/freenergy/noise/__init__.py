"""Where contrast comes from, and its store on disk."""
