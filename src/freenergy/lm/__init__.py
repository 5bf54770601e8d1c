"""P_LM(x): normalised, with exact scores and exact samples."""
