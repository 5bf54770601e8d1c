"""Images, pixel by pixel: reading them, rows for training, and bits per dimension."""
