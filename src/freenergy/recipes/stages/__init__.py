"""The stages that families share, one module per stage."""
