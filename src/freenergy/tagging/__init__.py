"""Which tag has each word? Labelled text, taggers with exact sums (``freenergy.structured``) and their measures."""
