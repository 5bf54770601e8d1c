"""Fast decoding: many candidates of one prefix at the speed of matrix products."""
